"""The doctor's look at the engine: the device, the choice, the kernels in the cache, and the self-test:
one engine on the problem of a trial (`engine.trial`) against fp64.

Compiles only where it was asked to. Imported once a framework is loaded, because the import binds
the package to it.
"""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..config import ResolvedConfig
from ..engine.capabilities import RECORDS
from ..engine.cold_start import run_jobs
from ..engine.select import ENGINES, EngineChoice, choose_engine, ready_engine, unavailable
from ..engine.settings import EngineSettings, Workload
from ..engine.trial import Problem
from ..engine.trust import Subject, is_untried
from ..enums import ActivationType, EngineName
from ..errors import SonicMoEError
from ..host import NVIDIA_DRIVER
from ..jit.cache import default_cache
from ..jit.errors import CompileError
from ..jit.guard import no_compile
from ..jit.plan import CompileJob
from ..routing.backends import arch_of, find_device
from .capture import to_numpy
from .doctor import COMPILE_COMMAND, PRECISIONS, Progress, Report
from .golden_stages import TENSORS, golden_tensors
from .stage_stats import closeness
from .step_dump import StepDump, StepSettings

# Sizes that every engine takes, and the smallest of them, so that a host computes them at once.
H, I = 256, 128

_ASK_FOR_IT = f"run `{COMPILE_COMMAND}`"
# Least cosine, most relative RMSE. The worst of all recipes and z codes is 8.0 % (dprobs, e4m3 z);
# BF16 rounding leaves 0.3 %.
LIMITS = {"fp8": (0.995, 0.10), "bf16": (0.9999, 0.01)}


def described(device: str) -> dict[str, str | None]:
    """Name, GPU and compute capability of a device, as a report has them."""
    if device == "cpu":
        return {"name": device, "gpu": None, "capability": None}
    major, minor = torch.cuda.get_device_capability(0)
    gpu = str(torch.cuda.get_device_name(0))
    return {"name": device, "gpu": gpu, "capability": f"{major}.{minor}"}


@dataclass(frozen=True)
class SelfTest:
    """Forward and backward of a small MoE on the engine that `config` chooses on `device`.

    precision: "bf16" (unquantised operands) or "fp8" (the configuration's recipe), whatever the
        configuration's `fp8_mode`.

    Everything here raises EngineUnavailableError or ConfigError where the configuration asks for
    what this machine or engine cannot do.
    """

    config: ResolvedConfig
    precision: str
    device: str

    @functools.cached_property
    def choice(self) -> EngineChoice:
        return choose_engine(self.device, self.config.engine, self._asked())

    @property
    def workload(self) -> Workload:
        """What the engine runs: after a fallback to another one with that engine's settings."""
        asked = self._asked()
        return replace(asked, settings=self.choice.settings or asked.settings)

    def _asked(self) -> Workload:
        config = self.config
        # Only where it differs: a mode that was set keeps what else it decides ("mem").
        if config.fp8 != (self.precision == "fp8"):
            config = config.replace(fp8_mode="perf" if self.precision == "fp8" else "off")
        return Workload(EngineSettings.from_config(config, ActivationType.SWIGLU), H, I)

    def kernels(self) -> tuple[CompileJob, ...]:
        """The kernels that it launches; none on a CPU."""
        if not self.device.startswith("cuda"):
            return ()
        record = RECORDS[EngineName(self.choice.engine.name)]
        return run_jobs(record, self.workload, arch_of(self.device))

    def untried(self) -> str | None:
        """The engine, where it has to pass a trial before it may run here."""
        if not self.device.startswith("cuda"):
            return None
        name, arch = EngineName(self.choice.engine.name), arch_of(self.device)
        subject = Subject(ENGINES[name], RECORDS[name], self.workload, self.device, arch)
        return name.value if is_untried(subject) else None

    def made_ready(self) -> SelfTest:
        """Compile what is missing, in parallel, and try an engine that never ran here, in a process of
        its own; the test of the engine that passed. A kernel that does not compile raises in `run`.
        """
        ready_engine(self.device, self.config.engine, self._asked())
        # The choice depends on what was tried, so it is made again.
        return replace(self)

    def run(self) -> list[dict[str, Any]]:
        """Every output and gradient, against fp64: on a host the engine that is tested is the
        trial's own reference.
        """
        problem, engine = Problem(self.workload, self.device), self.choice.engine
        computed = problem.train(engine)
        x, w1, w2, dout = map(to_numpy, (problem.x, problem.w1, problem.w2, problem.dout))
        arrays = (x, problem.indices, problem.probs, w1, w2, dout)
        golden = golden_tensors(StepDump("self-test", StepSettings(recipe=None), *arrays))
        checks = []
        for own, name in zip(TENSORS, ("out", "dx", "dprobs", "dw1", "dw2"), strict=True):
            found = closeness(computed[name].astype(np.float64), golden[own])
            least_cosine, most_error = LIMITS[self.precision]
            # Written so that NaN, which no comparison satisfies, does not pass.
            passed = found["cosine"] >= least_cosine and found["rmse"] <= most_error
            of = {"precision": self.precision, "engine": engine.name, "tensor": name}
            figures = {"cosine": found["cosine"], "relative_rmse": found["rmse"]}
            checks.append({**of, **figures, "passed": bool(passed)})
        return checks


def examine_engine(
    report: Report, config: ResolvedConfig, self_test: bool, progress: Progress
) -> None:
    """Fill `device`, `engine`, `engines`, `kernels` and `self_test`; a framework is loaded.

    Args:
        self_test: compile the kernels that are missing. Otherwise their number is reported, and the
            self-test runs where none is missing.
        progress: gets a line before everything that may take long.
    """
    device = find_device()
    report.device = described(device)
    # The commonest mistake of an installation: a framework that was built for CPUs.
    if device == "cpu" and NVIDIA_DRIVER.exists():
        report.warning(
            f"this machine has an NVIDIA driver but {report.framework} sees no GPU",
            "install its CUDA build",
        )
    try:
        _run(report, config, _tests(report, config, device), self_test, progress)
    except CompileError as error:
        # Not asked to compile, the list of kernels lacked one.
        tell = report.error if self_test else report.warning
        remedy = "install the compiler, or allow the compile" if self_test else _ASK_FOR_IT
        tell(f"the self-test did not run: {error}", remedy)
    except SonicMoEError as error:
        report.error(str(error), "change the flag it names; docs/env.md lists values and defaults")
    except Exception as error:  # a kernel that crashes is what a self-test is for
        report.error(
            f"self-test crashed: {type(error).__name__}: {error}",
            "rerun with SONIC_MOE_ENGINE=reference and report it",
        )
    failed = [check for check in report.self_test if not check["passed"]]
    if failed:
        wrong = ", ".join(f"{check['tensor']} ({check['precision']})" for check in failed)
        engines = " and ".join(sorted({check["engine"] for check in failed}))
        remedy = "do not train on this engine; SONIC_MOE_ENGINE=reference is exact; report it with"
        what = f"self-test: wrong {wrong} on engine {engines}"
        report.error(what, f"{remedy} `sonicmoe doctor --json`")


def _tests(report: Report, config: ResolvedConfig, device: str) -> list[SelfTest]:
    """Fill `engine` and `engines`; the self-tests of the precisions that may run here."""
    in_force = "fp8" if config.fp8 else "bf16"
    report.engines = {name.value: unavailable(name, device) or "able" for name in ENGINES}
    # The self-test asks as a call with these flags does, so the line cannot differ from what runs.
    choice = SelfTest(config, in_force, device).choice
    report.engine, report.engine_reason = choice.engine.name, choice.reason
    # An engine asked for by name computes FP8 or BF16, not both: only the precision in force is
    # tested.
    automatic = config.engine in (EngineName.AUTO, EngineName.REFERENCE)
    return [SelfTest(config, name, device) for name in (PRECISIONS if automatic else (in_force,))]


def _run(
    report: Report,
    config: ResolvedConfig,
    tests: list[SelfTest],
    self_test: bool,
    progress: Progress,
) -> None:
    """Fill `kernels`, and `self_test` where no kernel is missing."""
    start = time.perf_counter()
    for number, test in enumerate(tests if self_test else ()):
        progress(f"compiling and trying what the self-test in {test.precision} needs")
        tests[number] = test.made_ready()
    jobs = list(dict.fromkeys(job for test in tests for job in test.kernels()))
    # Looked up as a launch would, so that a kernel of another version or a damaged one is missing.
    cache = default_cache(config)
    missing = [job.name for job in jobs if cache.try_load(job.key()) is None]
    report.kernels = {"needed": len(jobs), "missing": missing}
    if missing and not self_test:
        report.warning(
            f"{len(missing)} of the {len(jobs)} kernels of the self-test are not compiled, so it "
            "did not run",
            f"`{COMPILE_COMMAND}` compiles and runs them; `sonicmoe warmup` compiles those of your "
            "model",
        )
        return
    with nullcontext() if self_test else no_compile():
        for test in tests:
            if not self_test and (untried := test.untried()) is not None:
                what = f"the self-test in {test.precision} did not run"
                words = f"{what}: engine {untried} never ran on such a GPU"
                report.warning(
                    words, f"{_ASK_FOR_IT}; it tries the engine first, in a process of its own"
                )
                continue
            progress(f"self-test in {test.precision}")
            report.self_test += test.run()
    report.self_test_seconds = time.perf_counter() - start
