"""The doctor's look at the engine: the device, the choice, the kernels in the cache, the self-test.

Compiles only where it was asked to. Imported once a framework is loaded, because the import binds
the package to it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

from ..config import ResolvedConfig
from ..engine.select import ENGINES, unavailable
from ..engine.trial import E
from ..enums import EngineName
from ..errors import SonicMoEError
from ..host import NVIDIA_DRIVER
from ..jit.cache import CompileCache, default_cache
from ..jit.errors import CompileError, CompileForbiddenError
from ..jit.guard import no_compile
from ..jit.parallel import FAILED
from ..jit.plan import CompileJob, ModelSpec
from ..jit.slots import HostSlots
from ..jit.warmup import warm_up
from .doctor_report import COMPILE_COMMAND, PRECISIONS, KernelState, Progress, Report
from .selftest import H, I, SelfTest, find_device


def examine_engine(
    report: Report, config: ResolvedConfig, self_test: bool, progress: Progress
) -> None:
    """Fill `device`, `engine`, `engines`, `kernels` and `self_test`; a framework is loaded.

    Args:
        self_test: compile the kernels that are missing. Otherwise their number is reported, and the
            self-test runs where none is missing.
        progress: gets a line before and after everything that may take long.
    """
    report.device = device = find_device()
    # The commonest mistake of an installation: a framework that was built for CPUs.
    if device.gpu is None and NVIDIA_DRIVER.exists():
        report.warning(
            f"this machine has an NVIDIA driver but {report.framework} sees no GPU",
            "install its CUDA build",
        )
    try:
        in_force = "fp8" if config.fp8 else "bf16"
        report.engines = {name.value: unavailable(name, device.name) or "able" for name in ENGINES}
        # The self-test asks as a call with these flags does, so the line cannot differ from what
        # runs.
        choice = SelfTest(config, in_force, device.name).choice
        report.engine, report.engine_reason = choice.engine.name, choice.reason
        # A GPU engine computes one precision: where it is asked for by name, the other is nobody's.
        automatic = config.engine in (EngineName.AUTO, EngineName.REFERENCE)
        precisions = PRECISIONS if automatic else (in_force,)
        tests = [SelfTest(config, name, device.name) for name in precisions]
        jobs = list(dict.fromkeys(job for test in tests for job in test.kernels()))
        if _kernels_are_there(report, config, jobs, self_test, progress):
            # The list of kernels may lack one. A doctor that was not asked to compiles nothing.
            with nullcontext() if self_test else no_compile():
                _run(report, tests, self_test, progress)
    except CompileForbiddenError as error:
        report.warning(f"the self-test did not run: {error}", f"run `{COMPILE_COMMAND}`")
    except SonicMoEError as error:
        report.error(str(error), "change the flag it names; docs/env.md lists values and defaults")
    except Exception as error:  # a kernel that crashes is what a self-test is for
        report.error(
            f"self-test crashed: {type(error).__name__}: {error}",
            "rerun with SONIC_MOE_ENGINE=reference and report it",
        )
    failed = [check for check in report.self_test if not check.passed]
    if failed:
        wrong = ", ".join(f"{check.tensor} ({check.precision})" for check in failed)
        engines = " and ".join(sorted({check.engine for check in failed}))
        remedy = (
            "do not train on this engine; SONIC_MOE_ENGINE=reference is exact; report it with "
            "`sonicmoe doctor --json`"
        )
        report.error(f"self-test: wrong {wrong} on engine {engines}", remedy)


def _kernels_are_there(
    report: Report,
    config: ResolvedConfig,
    jobs: list[CompileJob],
    self_test: bool,
    progress: Progress,
) -> bool:
    """Look for the kernels in the cache; compile the missing ones, or report them. Whether all are
    there.
    """
    # Looked up as a launch would, so that a kernel of another version or a damaged one is missing.
    cache = default_cache(config)
    missing = [job for job in jobs if cache.try_load(job.key()) is None]
    report.kernels = KernelState(len(jobs), tuple(job.name for job in missing))
    if missing and self_test:
        return _compile(report, cache, missing, progress)
    if missing:
        report.warning(
            f"{len(missing)} of the {len(jobs)} kernels of the self-test are not compiled, so it "
            "did not run",
            f"`{COMPILE_COMMAND}` compiles and runs them; `sonicmoe warmup` compiles those of your "
            "model",
        )
    return not missing


def _compile(
    report: Report, cache: CompileCache, missing: list[CompileJob], progress: Progress
) -> bool:
    """Compile in parallel processes. A kernel that does not compile is an error of the report."""
    spec, places = ModelSpec(E, H, I), HostSlots(cache.local_root).count
    progress(
        f"compiling {len(missing)} kernels in {min(places, len(missing))} processes, "
        "a minute or more"
    )
    try:
        built = warm_up(
            spec,
            cache,
            compile_jobs=missing,
            progress=lambda one: progress(f"{one.kernel}: {one.state} in {one.seconds:.1f} s"),
        )
    except CompileError as error:
        report.error(str(error), "install the compiler, or allow the compile")
        return False
    for outcome in built.kernels:
        if outcome.state == FAILED:
            report.error(
                f"{outcome.kernel} does not compile", f"its compiler says: {outcome.message}"
            )
    failed = tuple(one.kernel for one in built.kernels if one.state == FAILED)
    # Kernels that compiled are no longer missing; those that failed stay on the screen.
    report.kernels = KernelState(report.kernels.needed if report.kernels else 0, failed)
    return built.complete


def _run(report: Report, tests: list[SelfTest], self_test: bool, progress: Progress) -> None:
    start = time.perf_counter()
    for test in tests:
        untried = test.untried()
        if untried is not None and not self_test:
            report.warning(
                f"the self-test in {test.precision} did not run: engine {untried} never ran on "
                "such a GPU",
                f"`{COMPILE_COMMAND}` tries it first, in a process of its own",
            )
            continue
        if untried is not None:
            progress(f"engine {untried} is tried in a process of its own")
        progress(f"self-test in {test.precision}")
        report.self_test += (test if untried is None else test.make_ready()).run()
    report.self_test_seconds = time.perf_counter() - start
