"""Compiles a whole plan, several kernels at once, and writes the record of the warm-up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from . import files
from .cache import CompileCache
from .carried import carried
from .cpus import AUTO, compilers
from .key import package_versions
from .manifest import Artefact, utc_now
from .parallel import BUILT, CACHED, MISSING, KernelOutcome, Progress, build_all
from .place import Place, Trust
from .plan import CompileJob, ModelSpec, WarmUpPlan

SELECTED = "selected kernels"  # the precision of jobs that a caller picked
_RECORDS = "warmed"  # a directory beside the artefacts; a small JSON file for each warm-up
_VERSIONS_OF = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "quack-kernels", "triton")


@dataclass(frozen=True)
class WarmUpReport:
    """The outcome of a warm-up, or of a check of one.

    Attributes:
        spec: the model.
        precision: the precisions that the kernels cover (see `WarmUpPlan`); `SELECTED` for jobs
            that a caller picked.
        left_out: a line for each part that was asked for and has no kernels.
        record: the file that lists the warmed kernels; None of a check.
        local_dir, only_local: the node-local directory, and how many of the kernels lie there alone,
            where no other node looks.
        carried: how many of the kernels lie inside the installed package.
    """

    spec: ModelSpec
    precision: str
    left_out: tuple[str, ...]
    cache_dir: Path
    kernels: tuple[KernelOutcome, ...]
    seconds: float
    record: Path | None
    local_dir: Path | None = None
    only_local: int = 0
    carried: int = 0

    @property
    def complete(self) -> bool:
        """Whether every kernel of the plan is in the cache; `kernels` has an outcome for each."""
        return all(outcome.state in {BUILT, CACHED} for outcome in self.kernels)


def warm_up(
    spec: ModelSpec,
    cache: CompileCache,
    *,
    compile_jobs: WarmUpPlan | Sequence[CompileJob],
    jobs: int | None = None,
    progress: Progress | None = None,
) -> WarmUpReport:
    """Compile the kernels of a plan for `spec` and record them. A kernel that fails raises nothing;
    the report names it.

    Args:
        compile_jobs: the plan, or jobs that the caller picked.
        jobs: compilers at most; default: the CPUs that this process may use.
        progress: called once per kernel; its exception ends the warm-up, and what is compiled stays.

    Raises:
        CompileForbiddenError: something has to be compiled and that is forbidden.
        ToolchainError: something has to be compiled and its compiler is missing.
        BaseException: whatever `progress` raised.
    """
    started = time.monotonic()
    planned = _planned(compile_jobs)
    outcomes: list[KernelOutcome] = []

    def settle(outcome: KernelOutcome) -> None:
        outcomes.append(outcome)
        if progress is not None:
            progress(outcome)

    pending: list[CompileJob] = []
    # Everything that is cached is settled first, and a forbidden or impossible compile raises here,
    # before any compiler has started.
    for job in planned.jobs:
        key = job.key()
        if cache.share(key) is not None:
            settle(KernelOutcome(job.name, str(key), CACHED, 0.0))
        else:
            cache.require_compiler(key, "not warmed")
            pending.append(job)
    for outcome in build_all(pending, cache, compilers(jobs or AUTO)):
        settle(outcome)
    report = _report(spec, planned, cache, outcomes, started)
    # A record is the promise that every kernel of the plan is there, for all who share the directory.
    # One that this installation carries is not.
    there = bool(report.kernels) and report.complete and not report.carried
    return replace(report, record=_record(report, cache)) if there else report


def check(
    spec: ModelSpec,
    cache: CompileCache,
    compile_jobs: WarmUpPlan | Sequence[CompileJob],
) -> WarmUpReport:
    """Which kernels of `spec` are in the cache, intact; compiles and writes nothing."""
    return _report(spec, _planned(compile_jobs), cache, (), time.monotonic())


def _report(
    spec: ModelSpec,
    planned: WarmUpPlan,
    cache: CompileCache,
    outcomes: Sequence[KernelOutcome],
    started: float,
) -> WarmUpReport:
    """Without a record; `outcomes`: of a warm-up. A check has none: a kernel is there or missing."""
    found = [cache.try_load(job.key()) for job in planned.jobs]
    outcomes = outcomes or [
        KernelOutcome(job.name, str(job.key()), MISSING if artefact is None else CACHED, 0.0)
        for job, artefact in zip(planned.jobs, found, strict=True)
    ]
    return WarmUpReport(
        spec,
        planned.precision,
        planned.left_out,
        cache.root,
        # The order of completion differs from run to run, and reports should not.
        tuple(sorted(outcomes, key=lambda outcome: (outcome.kernel, outcome.key))),
        time.monotonic() - started,
        record=None,
        local_dir=cache.local_root,
        only_local=0 if cache.local_root == cache.root else _below(cache.local_root, found),
        carried=_below(carried().folder, found),
    )


def _below(root: Path, found: Sequence[Artefact | None]) -> int:
    """How many of them lie in a directory."""
    return sum(artefact.path.is_relative_to(root) for artefact in found if artefact is not None)


def _planned(compile_jobs: WarmUpPlan | Sequence[CompileJob]) -> WarmUpPlan:
    if isinstance(compile_jobs, WarmUpPlan):
        return compile_jobs
    return WarmUpPlan(tuple(compile_jobs), SELECTED)


def _record(report: WarmUpReport, cache: CompileCache) -> Path | None:
    """Write the record beside the artefacts, or on this node where the cache directory is read-only
    or full. None where neither takes it.
    """
    content = {
        "model": asdict(report.spec),
        "precision": report.precision,
        "left_out": list(report.left_out),
        "versions": {"sonicmoe": __version__, **dict(package_versions(*_VERSIONS_OF))},
        "kernels": [{"kernel": outcome.kernel, "key": outcome.key} for outcome in report.kernels],
        "at": utc_now(),
    }
    for place in cache.places:
        target = place / _RECORDS / f"{report.spec.digest(report.precision)}.json"
        try:
            target.parent.checked(make=True)
            files.write_text(target, json.dumps(content, indent=1))
            return target.path
        except OSError:
            continue
    return None


def read_records(root: Path) -> list[dict[str, Any]]:
    """Every readable record of a cache directory, in the order of their names. People read them; no
    kernel is loaded because of one.
    """
    records: list[dict[str, Any]] = []
    # A record is shown and never run, so it does not matter who wrote it.
    folder = Place.of(root, Trust.ANYBODY) / _RECORDS
    with suppress(OSError, ValueError):
        names = [name for name in files.names(folder) if name.endswith(".json")]
        found = (files.read_json(folder / name) for name in names)
        records.extend(record for record in found if isinstance(record, dict))
    return records
