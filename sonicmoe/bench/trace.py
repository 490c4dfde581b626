"""From a profiler's Chrome trace to GPU time per kernel, per stage and per phase. Pure data, no
framework.

Kernels belong to the range that was open on the thread that launched them, found by the launch's
correlation id; phases end with a synchronisation, so a kernel belongs to the phase during which it
was launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..observe import RANGE_PREFIX

PHASE_PREFIX = f"{RANGE_PREFIX}phase."
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Kernel:
    """One piece of GPU work; `stage` and `phase` are "" where no range was open."""

    name: str
    us: float
    stage: str
    phase: str


@dataclass(frozen=True)
class _Range:
    name: str
    start: float
    end: float
    thread: Any


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Every kernel, copy and fill of a Chrome trace, in order of time."""
    # Phase "X" marks complete events, which have a start and a duration. Times are microseconds on
    # one clock for host and device.
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    named = [
        _range(e)
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(RANGE_PREFIX)
    ]
    phases: list[_Range] = []
    by_thread: dict[Any, list[_Range]] = defaultdict(list)
    for one in named:
        (phases if one.name.startswith(PHASE_PREFIX) else by_thread[one.thread]).append(one)
    # A kernel runs after its launching call has returned, perhaps in another stage's time. The
    # profiler gives both the same correlation id, so the launch says where the kernel belongs.
    # By correlation id. Calls that launch nothing have none, or one that no kernel has.
    launches = {
        e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and _correlation(e)
    }
    found = []
    for event in sorted(
        (e for e in events if e.get("cat") in GPU_WORK), key=lambda e: float(e["ts"])
    ):
        # A trace that starts in the middle of a run may lack the launch. The kernel's own time is
        # then the best guess.
        launch = launches.get(_correlation(event), event)
        moment, thread = float(launch["ts"]), launch.get("tid")
        # Stages are looked up on the launching thread only: autograd's thread has ranges of its own
        # that overlap in time. Phases are not, because they were opened on the main thread.
        stage = _innermost(by_thread.get(thread, ()), moment).removeprefix(RANGE_PREFIX)
        phase = _innermost(phases, moment).removeprefix(PHASE_PREFIX)
        found.append(Kernel(event["name"], float(event["dur"]), stage, phase))
    return found


def gpu_spans(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """`(start, end)` in microseconds of every kernel, copy and fill, in order of time."""
    work = (
        event
        for event in trace.get("traceEvents", ())
        if event.get("ph") == "X" and event.get("cat") in GPU_WORK
    )
    return sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in work)


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Time inside at least one of the sorted spans."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        # Kernels of several streams may overlap. Only the part behind everything counted so far is
        # new.
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _range(event: Mapping[str, Any]) -> _Range:
    start = float(event["ts"])
    return _Range(event["name"], start, start + float(event["dur"]), event.get("tid"))


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _innermost(ranges: Sequence[_Range], moment: float) -> str:
    """The open range that began last."""
    opened = [r for r in ranges if r.start <= moment <= r.end]
    # Ranges on one thread are nested, so the one that began last is the innermost.
    return max(opened, key=lambda r: r.start).name if opened else ""


def total_us(kernels: Iterable[Kernel], by: str, calls: int) -> dict[str, float]:
    """Busy microseconds per call, summed by an attribute of `Kernel` ("name", "stage", "phase"),
    largest first.
    """
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[getattr(kernel, by)] += kernel.us / calls
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def short_name(kernel: str, width: int = 60) -> str:
    """A kernel's name without return type, arguments and template parameters."""
    name = (
        kernel.removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .split("(")[0]
        .split("<")[0]
        or kernel
    )
    return name if len(name) <= width else f"{name[: width - 1]}…"
