"""The first forward of a process that finds kernels missing compiles all that its run will need, in
parallel and together with the other ranks of the host.

Otherwise every kernel would be compiled where it is first needed, one after the other. Imports
neither a framework nor a compiler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from ..architectures import DEFAULT_ARCH
from ..config import ResolvedConfig, current_config
from ..jit.cache import CompileCache, default_cache
from ..jit.cpus import OFF, compilers
from ..jit.guard import forbidden_by
from ..jit.lock import may_say
from ..jit.parallel import FAILED, KernelOutcome, build_all
from ..jit.plan import CompileJob
from ..kernels import EVERY_RUN
from ..log import logger
from .capabilities import EngineRecord
from .settings import EngineSettings, Workload

_START_S = 2.0  # until the first compilers run: processes start, compilers are imported
_ASKED: set[tuple[object, ...]] = set()
_MUTEX = threading.Lock()


def compile_missing(
    record: EngineRecord, workload: Workload, arch: str, config: ResolvedConfig | None = None
) -> None:
    """Compile what a run of this workload on this engine needs and the cache does not hold.

    Looks once per process, cache and workload. Never raises for a kernel: one that failed, or may
    not be compiled, raises its own error where it is loaded, and that place knows whether there is
    something to fall back to.
    """
    # The configuration of the caller decides where kernels lie and how many compilers may run.
    settings = config or current_config()
    cache = default_cache(settings)
    asked = (cache.root, cache.local_root, record.name, workload, arch)
    # Threads of one process need the same kernels. The second one waits here for the first.
    with _MUTEX:
        if asked not in _ASKED:
            _ASKED.add(asked)
            if settings.compile_jobs != OFF and forbidden_by() is None:
                lacking = missing(run_jobs(record, workload, arch), cache)
                _compile(lacking, workload, settings, _options(workload.settings, arch))


def run_jobs(record: EngineRecord, workload: Workload, arch: str) -> tuple[CompileJob, ...]:
    """Every distinct compile job that a run of this workload may load: forward, backward, flush."""
    # Two lists may name the same source, and each kernel is compiled once.
    jobs = (*record.jobs(workload, arch), *(source(arch) for source in EVERY_RUN))
    return tuple(dict.fromkeys(jobs))


def missing(jobs: Sequence[CompileJob], cache: CompileCache) -> list[CompileJob]:
    """Those that the cache does not hold and this machine can compile."""
    # A job without a toolchain cannot be compiled here. Its loader says so, with the way out.
    keys = ((job, job.key()) for job in jobs)
    return [job for job, key in keys if key.toolchain is not None and cache.try_load(key) is None]


def expected_seconds(jobs: Sequence[CompileJob], processes: int) -> float:
    """How long it takes at best: the longest job, or the work shared evenly."""
    # No process can share one job, so the longest one is a floor.
    efforts = [job.effort_s for job in jobs]
    return _START_S + max(*efforts, sum(efforts) / processes)


def _compile(
    jobs: list[CompileJob], workload: Workload, settings: ResolvedConfig, options: str
) -> None:
    if not jobs:
        return
    cache = default_cache(settings)
    processes = min(compilers(settings.compile_jobs), len(jobs))
    started = time.monotonic()
    # One line for the ranks of a host, from the one that gets here first.
    speaks = may_say(cache.local_root, f"cold start of {workload}")
    level = logging.WARNING if speaks else logging.DEBUG
    logger.log(
        level,
        "sonicmoe: compiling %d kernels with %d processes, about %.0f s; "
        "`sonicmoe warmup --E <local experts> --H %d --I %d%s` does this ahead of time",
        len(jobs),
        processes,
        expected_seconds(jobs, processes),
        workload.hidden_size,
        workload.intermediate_size,
        options,
    )
    outcomes = list(build_all(jobs, cache, processes))
    _report(outcomes, time.monotonic() - started, level)


def _options(settings: EngineSettings, arch: str) -> str:
    """What a warm-up is told beside the sizes, where it is not the default."""
    # A user copies this line, so it has what the command does not assume.
    named = "" if arch == DEFAULT_ARCH else f" --arch {arch}"
    if settings.activation is EngineSettings().activation:
        return named
    parameters = settings.activation_parameters
    own = (f" --activation-parameter {name}={value!r}" for name, value in parameters)
    return f"{named} --activation {settings.activation.value}{''.join(own)}"


def _report(outcomes: Sequence[KernelOutcome], seconds: float, level: int) -> None:
    failed = sorted({outcome.kernel for outcome in outcomes if outcome.state == FAILED})
    ready = len(outcomes) - sum(outcome.state == FAILED for outcome in outcomes)
    # The error itself comes where the kernel is loaded.
    problem = f"; failed: {', '.join(failed)}" if failed else ""
    logger.log(level, "sonicmoe: %d kernels are ready after %.1f s%s", ready, seconds, problem)
