"""Processes that share the GPUs of a host until a time limit, none of which outlives its parent.
Imported by the benchmarks beside it; imports no framework.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from sonicmoe.host import capabilities_of_host

HOST = ""  # the device that a process sees no GPU on
GRACE_S = 15.0  # from the polite signal to the end
_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The system kills the process with the one that started it, however that ends; the parent may have
# died before the system was asked.
_PROGRAM = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); parent = int(sys.argv.pop(1)); "
    "os.getppid() == parent or sys.exit('the parent is gone'); "
    "from runpy import run_module; module = sys.argv.pop(1); "
    "run_module(module, run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Task:
    """`sonicmoe ARGUMENTS`, whose output goes to `log`. alone: it takes all slots of its device."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    alone: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a task ended: "finished", "failed", "stopped" (at the time limit, or on a signal) or "not
    started". code: its exit code, None for one that was not started.
    """

    task: Task
    state: str
    seconds: float = 0.0
    code: int | None = None


@dataclass(eq=False)
class _Running:
    task: Task
    device: str
    process: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def outcome(self) -> Outcome:
        code = self.process.returncode
        state = "finished" if code == 0 else "stopped" if self.stopped else "failed"
        return Outcome(self.task, state, time.monotonic() - self.since, code)


def child_command(module: str, arguments: Sequence[str]) -> list[str]:
    """`python -m MODULE ARGUMENTS` as a child that the system kills when this process ends."""
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, *arguments]


def gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process of this environment may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(len(capabilities_of_host()))]


class StopRequest:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request, so that what is finished is reported. A
    context manager.

    Attributes:
        asked: whether a signal came.
    """

    def __init__(self) -> None:
        """Nothing is taken before the context begins."""
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class GpuQueue:
    """Runs tasks on devices, `slots` at a time on each, those that are `alone` first."""

    def __init__(
        self,
        tasks: Sequence[Task],
        devices: Sequence[str],
        slots: int,
        environment: Mapping[str, str],
        say: Callable[[str], None] = print,
    ) -> None:
        """Nothing is started yet; `say` gets a line for every start and end."""
        # A task that needs a whole device would wait for ever behind those that share one.
        self._waiting = sorted(tasks, key=lambda task: not task.alone)
        self._devices, self._slots, self._say = list(devices), slots, say
        self._environment = dict(environment)
        self._running: list[_Running] = []
        self._outcomes: dict[str, Outcome] = {}
        self._order = [task.name for task in tasks]

    @property
    def running(self) -> list[Task]:
        """The tasks that run now."""
        return [one.task for one in self._running]

    def run(
        self,
        deadline: float,
        asked_to_stop: Callable[[], bool] = lambda: False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Run all to their end, to `deadline` (of `time.monotonic`) or until asked to stop; one
        outcome for every task, in their order. on_wait: called ten times a second.
        """
        try:
            while self._waiting or self._running:
                if time.monotonic() >= deadline or asked_to_stop():
                    break
                self._start_what_fits()
                self._collect()
                on_wait()
                time.sleep(_POLL_S)
        finally:
            self._stop_all()
        for task in self._waiting:
            self._outcomes[task.name] = Outcome(task, "not started")
        return [self._outcomes[name] for name in self._order]

    def _start_what_fits(self) -> None:
        for task in list(self._waiting):
            device = self._place_for(task)
            if device is not None:
                self._waiting.remove(task)
                self._start(task, device)

    def _place_for(self, task: Task) -> str | None:
        """The device with the fewest tasks that has room for it."""
        taken = {device: 0 for device in self._devices}
        for one in self._running:
            taken[one.device] += self._slots if one.task.alone else 1
        needed = self._slots if task.alone else 1
        device = min(self._devices, key=lambda name: taken[name])
        return device if taken[device] + needed <= self._slots else None

    def _start(self, task: Task, device: str) -> None:
        task.log.parent.mkdir(parents=True, exist_ok=True)
        with task.log.open("wb") as log:
            process = subprocess.Popen(
                child_command("sonicmoe", task.arguments),
                env={**self._environment, "CUDA_VISIBLE_DEVICES": device},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Of its own session, so that Ctrl-C reaches this process alone, which stops the
                # others with all that they have started.
                start_new_session=True,
            )
        self._running.append(_Running(task, device, process))
        self._say(f"{task.name}: started{f' on GPU {device}' if device != HOST else ''}")

    def _collect(self) -> None:
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            outcome = self._outcomes[one.task.name] = one.outcome()
            how = (
                "" if outcome.state == "finished" else f", exit code {outcome.code}, {one.task.log}"
            )
            self._say(f"{one.task.name}: {outcome.state} after {outcome.seconds:.0f} s{how}")

    def _stop_all(self) -> None:
        for one in self._running:
            one.stopped = True
            one.process.terminate()
        until = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < until:
            self._collect()
            time.sleep(_POLL_S)
        for one in self._running:
            # Not reaped yet, so the number is still that of its session.
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
        self._collect()
