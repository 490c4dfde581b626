"""Whether an engine may run on a GPU architecture that it never ran on: it is tried there first, in
a process of its own, against the reference engine (`trial.py`).

The verdict lies in the compile cache beside the kernels, for these kernels, this kind of GPU and
this driver. So ranks of a host share one trial, later runs make none, and a changed kernel or driver
means a new one. An engine whose record lists the architecture as proven is never tried.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from ..config import ResolvedConfig, current_config
from ..enums import EngineCheck
from ..errors import EngineUnavailableError
from ..host_gpus import UNKNOWN, driver_version
from ..interop import FRAMEWORK
from ..jit.cache import CompileCache, default_cache
from ..jit.child import search_path
from ..jit.errors import CacheUnwritableError
from ..jit.guard import forbidden_by
from ..jit.key import CompileKey
from ..jit.manifest import Artefact
from ..routing.backends import index_of_gpu
from .capabilities import EngineRecord, TokenFormat, Workload, problem
from .cold_start import run_jobs
from .trial import BEGIN, DONE, RESULT, STARTED, record_of

logger = logging.getLogger("sonicmoe")

VERDICT = "verdict.json"
HOW_TO_SKIP = "SONIC_MOE_ENGINE_CHECK=off runs it unchecked"
_LARGEST = 1024  # H and I of a trial, where smaller ones are served by the same kernels
# The kernel kills this process with the one that started it, however that ends.
_PROGRAM = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); "
    "from sonicmoe.frameworks import load; load({framework!r}); "
    "from sonicmoe.engine.trial import main; sys.exit(main())"
)
_LAST_WORDS = 4000
# Of a trial that decides nothing. While this rank tries again, another one of the host may succeed,
# and ranks that run different engines are worth avoiding.
_ATTEMPTS = 2
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")
# Of an error that says nothing of the engine.
_ELSEWHERE = ("out of memory", "CompileForbiddenError", "ToolchainError", "MemoryError")


@dataclass(frozen=True)
class Limits:
    """Seconds until the reference engine has run in a new process, and for each case."""

    start: float = 300.0
    case: float = 60.0


LIMITS = Limits()


@dataclass(frozen=True)
class Verdict:
    """What a trial found. `reason`: why the engine is not trusted, in words; `cases`: the events of
    `trial.judged`. `stored`: later runs find it.
    """

    trusted: bool
    reason: str = ""
    cases: tuple[dict[str, Any], ...] = ()
    stored: bool = field(default=True, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {"trusted": self.trusted, "reason": self.reason, "cases": list(self.cases)}


class UndecidedError(Exception):
    """A trial that says nothing of the engine, for example because the GPU had no memory left."""


@dataclass(frozen=True)
class Subject:
    """An engine with a workload on a device.

    engine: `module:class`. arch, gpu, driver: of the device.
    """

    engine: str
    record: EngineRecord
    workload: Workload
    device: str
    arch: str
    gpu: str
    driver: str

    @classmethod
    def of(
        cls, engine: Any, record: EngineRecord, workload: Workload, device: str, arch: str
    ) -> Subject:
        """Of the class of an engine on a GPU."""
        # The format of the tokens has no say in which engine runs, and every format is tried.
        plain = replace(workload, tokens=TokenFormat.PLAIN)
        gpu = gpu_name(device)
        name = f"{engine.__module__}:{engine.__qualname__}"
        return cls(name, record, plain, device, arch, gpu, driver_version())

    def key(self, cache: CompileCache) -> CompileKey:
        """Of the verdict: the kernels as the cache holds them, and what decides how they run."""
        found = (
            (job.key(), cache.try_load(job.key()))
            for job in run_jobs(self.record, self.workload, self.arch)
        )
        kernels = sorted(key.family if a is None else a.path.name for key, a in found)
        called = record_of(self.workload)
        # Kernels are made for ranges of sizes, and their keys say which.
        del called["hidden_size"], called["intermediate_size"]
        content = json.dumps([kernels, called], sort_keys=True)
        return CompileKey.make(
            "verdict",
            arch=self.arch,
            statics={
                "engine": self.engine,
                "framework": FRAMEWORK,
                "kernels": hashlib.sha256(content.encode()).hexdigest()[:32],
            },
            fingerprint={"gpu": self.gpu, "driver": self.driver},
            toolchain={},
        )

    def smaller(self) -> Workload:
        """The workload in the smallest sizes that the same kernels serve, down to `_LARGEST`."""
        jobs, found = self.record.jobs(self.workload, self.arch), self.workload
        for name in ("hidden_size", "intermediate_size"):
            while getattr(found, name) > _LARGEST:
                half = replace(found, **{name: getattr(found, name) // 2})
                if problem(self.record, half) or self.record.jobs(half, self.arch) != jobs:
                    break
                found = half
        return found

    def __str__(self) -> str:
        return f"engine {self.record.name.value} on {self.gpu} ({self.arch})"


def gpu_name(device: str) -> str:
    """ "NVIDIA H200" for "cuda:0"; "unknown" where there is none."""
    if not torch.cuda.is_available():
        return UNKNOWN
    return str(torch.cuda.get_device_name(index_of_gpu(device)))


_Known = tuple[str, Workload, str]
_KNOWN: dict[_Known, Verdict] = {}
_MUTEX = threading.Lock()


def forget() -> None:
    """Forget every verdict of this process. For tests."""
    _KNOWN.clear()


def needs_trial(record: EngineRecord, arch: str) -> bool:
    """Whether this engine has to pass a trial on this architecture before it may run there."""
    check = current_config().engine_check
    if check is EngineCheck.OFF or not record.architectures:
        return False
    return check is EngineCheck.ALWAYS or not record.is_proven(arch)


def refusal(
    engine: Any, record: EngineRecord, workload: Workload | None, device: str, arch: str
) -> str | None:
    """Why an earlier trial, of this process or of another one, keeps this engine from running."""
    if workload is None or not needs_trial(record, arch):
        return None
    verdict = _known(engine, record, workload, device, arch)
    return None if verdict is None or verdict.trusted else verdict.reason


def trusted(engine: Any, record: EngineRecord, workload: Workload, device: str, arch: str) -> bool:
    """Whether this engine may run this workload; tries it where nobody did. Its kernels are
    compiled. Where it may not, `refusal` says why from now on.
    """
    if not needs_trial(record, arch):
        return True
    verdict = _known(engine, record, workload, device, arch)
    if verdict is None:
        subject = Subject.of(engine, record, workload, device, arch)
        cache = default_cache()
        # A kernel that could not be compiled, or may not be, raises its own error where it is loaded.
        if not _compiled(subject, cache):
            return True
        # Threads of one process run the same layers. The second one waits here for the first.
        with _MUTEX:
            verdict = _KNOWN.get(_place(subject.record, subject.workload, device))
            if verdict is None:
                verdict = _remember(subject, _judge(subject, cache))
    return verdict.trusted


def is_untried(
    engine: Any, record: EngineRecord, workload: Workload, device: str, arch: str
) -> bool:
    """Whether this engine has to pass a trial for this workload, and nobody tried it yet."""
    return needs_trial(record, arch) and _known(engine, record, workload, device, arch) is None


def require_tried(
    engine: Any, record: EngineRecord, workload: Workload, device: str, arch: str
) -> None:
    """For the capture of a CUDA graph, which a trial would not be part of.

    Raises:
        EngineUnavailableError: the engine was not tried yet.
    """
    if is_untried(engine, record, workload, device, arch):
        name = record.name.value
        raise EngineUnavailableError(
            f"engine {name!r} never ran on {arch}, and its check cannot run while a CUDA graph is "
            f"captured; run one forward before the capture. {HOW_TO_SKIP}"
        )


def _place(record: EngineRecord, workload: Workload, device: str) -> _Known:
    return record.name.value, replace(workload, tokens=TokenFormat.PLAIN), device


def _known(
    engine: Any, record: EngineRecord, workload: Workload, device: str, arch: str
) -> Verdict | None:
    """The verdict of this process, or one that the cache holds."""
    known = _KNOWN.get(_place(record, workload, device))
    if known is not None or current_config().engine_check is EngineCheck.ALWAYS:
        return known
    subject, cache = Subject.of(engine, record, workload, device, arch), default_cache()
    artefact = cache.try_load(subject.key(cache))
    return None if artefact is None else _remember(subject, _read(artefact))


def _remember(subject: Subject, verdict: Verdict) -> Verdict:
    _KNOWN[_place(subject.record, subject.workload, subject.device)] = verdict
    return verdict


def _read(artefact: Artefact) -> Verdict:
    found = json.loads(artefact.file(VERDICT).read_text(encoding="utf-8"))
    return Verdict(found["trusted"], found["reason"], tuple(found["cases"]))


def _compiled(subject: Subject, cache: CompileCache) -> bool:
    """Whether the cache holds every kernel, after compiling what a run would compile later."""
    missing = [
        job
        for job in run_jobs(subject.record, subject.workload, subject.arch)
        if cache.try_load(job.key()) is None
    ]
    # Kernels are compiled by now, unless every kernel is to be compiled where it is needed first.
    if missing and forbidden_by() is None and current_config().compile_jobs == "off":
        for job in missing:
            job.compile(cache)
        return True
    return not missing


def _judge(subject: Subject, cache: CompileCache) -> Verdict:
    """The stored verdict, made by one process of all that ask at once."""

    def build(folder: Path) -> None:
        verdict = announced_trial(subject)
        (folder / VERDICT).write_text(json.dumps(verdict.to_json(), indent=1), encoding="utf-8")

    why = ""
    for _ in range(_ATTEMPTS):
        try:
            if current_config().engine_check is EngineCheck.ALWAYS:
                return replace(announced_trial(subject), stored=False)
            try:
                return _read(cache.install(subject.key(cache), build))
            except CacheUnwritableError:
                return replace(announced_trial(subject), stored=False)
        except UndecidedError as undecided:
            why = str(undecided)
    reason = f"it could not be checked on this GPU, where it never ran: {why}. {HOW_TO_SKIP}"
    return Verdict(False, reason, stored=False)


def announced_trial(subject: Subject) -> Verdict:
    """`try_engine` with a line before and one after.

    Raises:
        UndecidedError: see there.
    """
    logger.warning(
        "sonicmoe: %s is not proven: it is checked against the reference engine first, once for "
        "these kernels and this driver, in a process of its own",
        subject,
    )
    started = time.monotonic()
    verdict = try_engine(subject)
    seconds = time.monotonic() - started
    words = "passed its check" if verdict.trusted else "failed its check"
    logger.warning("sonicmoe: %s %s in %.0f s", subject, words, seconds)
    if verdict.trusted:
        return verdict
    reason = f"its check on {subject.gpu} failed: {verdict.reason}. {HOW_TO_SKIP}"
    return replace(verdict, reason=reason)


def try_engine(subject: Subject, limits: Limits | None = None) -> Verdict:
    """Run `trial.py` in a new process and judge what it says; `reason` names the case.

    Raises:
        UndecidedError: nothing was learnt about the engine; in words.
    """
    request = {
        "engine": subject.engine,
        "workload": record_of(subject.smaller()),
        "device": subject.device,
        "config": _config_of_child(current_config()),
    }
    watched = _Watched(limits or LIMITS)
    with _process(request) as (process, last_words):
        ended = watched.follow(process)
        words = last_words()
    if ended is None:
        return Verdict(watched.reason is None, watched.reason or "", tuple(watched.cases))
    if watched.case is None:
        raise UndecidedError(f"{ended} before the first case{_quoted(words)}")
    if watched.reason is None:
        if ended.startswith("exit") and any(sign in words for sign in _ELSEWHERE):
            raise UndecidedError(f"{watched.case}: {ended}{_quoted(words)}")
        if ended == "killed":  # by somebody else, as a rule because the host had no memory left
            raise UndecidedError(f"{watched.case}: the process was killed from outside")
        watched.reason = f"{watched.case}: {ended}{_quoted(words)}"
    return Verdict(False, watched.reason, tuple(watched.cases))


def _config_of_child(config: ResolvedConfig) -> dict[str, Any]:
    """It loads kernels from where this process does, and compiles none."""
    return {
        "cache_dir": str(config.cache_dir),
        "local_cache_dir": str(config.local_cache_dir),
        "trust_cache": config.trust_cache,
        "forbid_compile": True,
    }


class _Watched:
    """Follows the events of a trial; `case`: the one that ran last; `reason`: the first problem."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.case: str | None = None
        self.cases: list[dict[str, Any]] = []
        self.reason: str | None = None

    def follow(self, process: subprocess.Popen[str]) -> str | None:
        """Until the end. None: every case was run; otherwise how the process ended, in words."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        limit = self._limits.start
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                return f"did not end within {limit:.0f} s"
            if line is None:
                return _end_of(process, self._limits.case)
            event = json.loads(line)
            if event["event"] == DONE:
                return None
            if event["event"] == STARTED:
                limit = self._limits.case
            elif event["event"] == BEGIN:
                self.case = event["case"]
            elif event["event"] == RESULT:
                self.cases.append(event)
                if event["problem"] and self.reason is None:
                    self.reason = f"{event['case']}: {event['problem']}"


def _forward(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    # The pipe is closed under this thread where the process had to be killed.
    with suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(None)


def _end_of(process: subprocess.Popen[str], limit: float) -> str:
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"did not end within {limit:.0f} s"
    if status == -signal.SIGKILL:
        return "killed"
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    return f"exit status {status}"


@contextmanager
def _process(
    request: dict[str, Any],
) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """A process that tries an engine, and a function that returns the end of what it printed. It is
    gone afterwards.
    """
    program = _PROGRAM.format(framework=FRAMEWORK)
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, "PYTHONPATH": search_path()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True,
            start_new_session=True,
        )  # fmt: skip

        def last_words() -> str:
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(0, size - _LAST_WORDS))
            return printed.read().decode(errors="replace").strip()

        try:
            assert process.stdin is not None
            # It may have died by now, and its end tells more than this error.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            yield process, last_words
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A driver that tears a hanging kernel down may take its time; nobody waits for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)


def _quoted(words: str) -> str:
    """The error that ended the process: CUDA's are followed by lines of advice."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return "".join(f" ({line})" for line in (errors or lines)[-1:])
