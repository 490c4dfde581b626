"""Whether an engine may run on a GPU architecture that it never ran on: it is tried there first, in
a process of its own, against the reference engine (`trial.py`).

The verdict lies in the compile cache beside the kernels, for these kernels, this kind of GPU and
this driver. So ranks of a host share one trial, later runs make none, and a changed kernel or driver
means a new one. An engine whose record lists the architecture as proven is never tried.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..config import current_config
from ..errors import EngineUnavailableError
from ..host import UNKNOWN, driver_version
from ..interop import FRAMEWORK
from ..jit.cache import CompileCache, default_cache
from ..jit.errors import CacheUnwritableError
from ..jit.guard import forbidden_by
from ..jit.key import VERDICT, CompileKey
from ..jit.manifest import Artefact
from ..log import logger
from ..routing.backends import index_of_gpu
from .capabilities import EngineRecord, problem
from .cold_start import run_jobs
from .interface import Engine
from .settings import TokenFormat, Workload
from .trial import BEGIN, RESULT, Request
from .trial_process import Event, quoted, run_trial

_FILE = "verdict.json"
HOW_TO_SKIP = "SONIC_MOE_ENGINE_CHECK=0 runs it unchecked"
_LARGEST = 1024  # H and I of a trial, where smaller ones are served by the same kernels
# Of an error that says nothing of the engine.
_ELSEWHERE = ("out of memory", "CompileForbiddenError", "ToolchainError", "MemoryError")


@dataclass(frozen=True)
class Verdict:
    """What a trial found. `reason`: why the engine is not trusted, in words; `cases`: the events of
    `trial.judged`.
    """

    trusted: bool
    reason: str = ""
    cases: tuple[Event, ...] = ()


class UndecidedError(Exception):
    """A trial that says nothing of the engine, for example because the GPU had no memory left."""


@dataclass(frozen=True)
class Subject:
    """An engine, by its class, with a workload on a device of this architecture."""

    engine: Callable[[], Engine]
    record: EngineRecord
    workload: Workload
    device: str
    arch: str

    @property
    def place(self) -> tuple[str, Workload, str]:
        """What a verdict holds for in this process."""
        # The format of the tokens has no say in which engine runs, and every format is tried.
        plain = replace(self.workload, tokens=TokenFormat.PLAIN)
        return self.record.name.value, plain, self.device

    def key(self, cache: CompileCache) -> CompileKey:
        """The key of the verdict: the kernels as the cache holds them, and what decides how they run."""
        found = (
            (job.key(), cache.try_load(job.key()))
            for job in run_jobs(self.record, self.workload, self.arch)
        )
        # The name of an artefact says what its files hold, so another build of the same kernel is
        # another subject.
        kernels = sorted(key.family if a is None else a.path.name for key, a in found)
        # Kernels are made for ranges of sizes, and their keys say which.
        called = replace(self.place[1], hidden_size=0, intermediate_size=0)
        content = json.dumps([kernels, repr(called)])
        return CompileKey.make(
            VERDICT,
            arch=self.arch,
            statics={
                "engine": f"{self.engine.__module__}:{self.engine.__qualname__}",
                "framework": FRAMEWORK,
                "kernels": hashlib.sha256(content.encode()).hexdigest()[:32],
            },
            fingerprint={"gpu": gpu_name(self.device), "driver": driver_version()},
            toolchain={},
        )

    def smaller(self) -> Workload:
        """The workload in the smallest sizes that the same kernels serve, down to `_LARGEST`."""
        # The trial should take seconds: it runs what the same kernels compute in smaller sizes.
        jobs, found = self.record.jobs(self.workload, self.arch), self.workload
        for name in ("hidden_size", "intermediate_size"):
            while getattr(found, name) > _LARGEST:
                half = replace(found, **{name: getattr(found, name) // 2})
                if problem(self.record, half) or self.record.jobs(half, self.arch) != jobs:
                    break
                found = half
        return found

    def __str__(self) -> str:
        return f"engine {self.record.name.value} on {gpu_name(self.device)} ({self.arch})"


def gpu_name(device: str) -> str:
    """ "NVIDIA H200" for "cuda:0"; "unknown" where there is none."""
    if not torch.cuda.is_available():
        return UNKNOWN
    return str(torch.cuda.get_device_name(index_of_gpu(device)))


_KNOWN: dict[tuple[str, Workload, str], Verdict] = {}
_MUTEX = threading.Lock()


def refusal(subject: Subject) -> str | None:
    """Why an earlier trial, of this process or of another one, keeps this engine from running."""
    # Asked at every choice of an engine, so it must not start a trial.
    verdict = _known(subject) if _needs_trial(subject) else None
    return None if verdict is None or verdict.trusted else verdict.reason


def trusted(subject: Subject) -> bool:
    """Whether this engine may run this workload; tries it where nobody did. Its kernels are
    compiled. Where it may not, `refusal` says why from now on.
    """
    if not is_untried(subject):
        return refusal(subject) is None
    cache = default_cache()
    # A kernel that could not be compiled, or may not be, raises its own error where it is loaded.
    if not _compiled(subject, cache):
        return True
    # Threads of one process run the same layers. The second one waits here for the first.
    with _MUTEX:
        if subject.place not in _KNOWN:
            _KNOWN[subject.place] = _judge(subject, cache)
    return _KNOWN[subject.place].trusted


def is_untried(subject: Subject) -> bool:
    """Whether this engine has to pass a trial for this workload, and nobody tried it yet."""
    return _needs_trial(subject) and _known(subject) is None


def require_tried(subject: Subject) -> None:
    """For the capture of a CUDA graph, which a trial would not be part of."""
    if is_untried(subject):
        raise EngineUnavailableError(
            f"engine {subject.record.name.value!r} never ran on {subject.arch}, and its check cannot "
            f"run while a CUDA graph is captured; run one forward before the capture. {HOW_TO_SKIP}"
        )


def _needs_trial(subject: Subject) -> bool:
    # The reference engine has no architectures: it is what others are compared with.
    record = subject.record
    unproven = bool(record.architectures) and not record.is_proven(subject.arch)
    return unproven and current_config().engine_check


def _known(subject: Subject) -> Verdict | None:
    """The verdict of this process, or one that the cache holds."""
    known = _KNOWN.get(subject.place)
    if known is not None:
        return known
    cache = default_cache()
    artefact = cache.try_load(subject.key(cache))
    found = None if artefact is None else _read(artefact)
    if found is not None:
        _KNOWN[subject.place] = found
    return found


def _read(artefact: Artefact) -> Verdict | None:
    """None where it cannot be read: an error of the file system says nothing of the engine."""
    try:
        found = json.loads(artefact.file(_FILE).read_text(encoding="utf-8"))
        return Verdict(found["trusted"], found["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _compiled(subject: Subject, cache: CompileCache) -> bool:
    """Whether the cache holds every kernel, after compiling what a run would compile later."""
    # The process of a trial loads kernels and compiles none, so all must be there before it starts.
    jobs = run_jobs(subject.record, subject.workload, subject.arch)
    missing = [job for job in jobs if cache.try_load(job.key()) is None]
    # Kernels are compiled by now, unless every kernel is to be compiled where it is needed first.
    if missing and forbidden_by() is None and current_config().compile_jobs == "off":
        for job in missing:
            job.compile(cache)
        return True
    return not missing


def _judge(subject: Subject, cache: CompileCache) -> Verdict:
    """The verdict that the cache keeps; where none can be kept or read, one for this process."""
    # The lock of the cache lets one process build; the others wait, and read what it wrote.
    made: list[Verdict] = []

    def build(folder: Path) -> None:
        if not made:  # the cache asks again for its other directory
            made.append(announced_trial(subject))
        (folder / _FILE).write_text(json.dumps(asdict(made[0]), indent=1), encoding="utf-8")

    try:
        with suppress(CacheUnwritableError):
            found = _read(cache.install(subject.key(cache), build))
            if found is not None:
                return found
            logger.warning(
                "sonicmoe: the verdict on %s cannot be read, so it is checked again", subject
            )
        return made[0] if made else announced_trial(subject)
    except UndecidedError as undecided:
        # No second attempt: the next process asks again, and finds what another rank has decided.
        return Verdict(
            False,
            f"it could not be checked on this GPU, where it never ran: {undecided}. {HOW_TO_SKIP}",
        )


def announced_trial(subject: Subject) -> Verdict:
    """`try_engine` with a line before and one after; errors as there."""
    logger.warning(
        "sonicmoe: %s is not proven: it is checked against the reference engine first, once for "
        "these kernels and this driver, in a process of its own",
        subject,
    )
    # The log has both lines, because a first run waits here for minutes.
    started = time.monotonic()
    verdict = try_engine(subject)
    seconds = time.monotonic() - started
    words = "passed its check" if verdict.trusted else "failed its check"
    logger.warning("sonicmoe: %s %s in %.0f s", subject, words, seconds)
    if verdict.trusted:
        return verdict
    reason = f"its check on {gpu_name(subject.device)} failed: {verdict.reason}. {HOW_TO_SKIP}"
    return replace(verdict, reason=reason)


def try_engine(subject: Subject) -> Verdict:
    """Run `trial.py` in a new process and judge what it says; `reason` names the case.
    UndecidedError: nothing was learnt about the engine, in words.
    """
    config = current_config()
    # The process loads kernels from where this one does, and compiles none.
    settings = {
        "cache_dir": str(config.cache_dir),
        "local_cache_dir": str(config.local_cache_dir),
        "trust_cache": config.trust_cache,
        "forbid_compile": True,
    }
    request = Request(subject.engine, subject.smaller(), subject.device, settings)
    events, ended, words = run_trial(request)
    cases = tuple(event for event in events if event["event"] == RESULT)
    problems = (f"{case['case']}: {case['problem']}" for case in cases if case["problem"])
    reason = next(problems, None)
    # A wrong number stays a verdict even where a later case ended the process.
    if ended is None or reason is not None:
        return Verdict(reason is None, reason or "", cases)
    begun = [event["case"] for event in events if event["event"] == BEGIN]
    if not begun:
        raise UndecidedError(f"{ended} before the first case{quoted(words)}")
    if ended == "killed":  # by somebody else, as a rule because the host had no memory left
        raise UndecidedError(f"{begun[-1]}: the process was killed from outside")
    reason = f"{begun[-1]}: {ended}{quoted(words)}"
    # A full GPU or a missing compiler is no fault of the kernels. The next process asks again.
    if ended.startswith("exit") and any(sign in words for sign in _ELSEWHERE):
        raise UndecidedError(reason)
    return Verdict(False, reason, cases)
