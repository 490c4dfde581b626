"""From a profiler's Chrome trace to GPU time per kernel, per stage and per phase. Pure data, no
framework.

Kernels belong to the range that was open on the thread that launched them, found by the launch's
correlation id; phases end with a synchronisation, so a kernel belongs to the phase during which it
was launched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..observe import RANGE_PREFIX

PHASE_PREFIX = f"{RANGE_PREFIX}phase."
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Kernel:
    """One piece of GPU work that began at `start`, in microseconds; `stage` and `phase` are ""
    where no range was open.
    """

    name: str
    start: float
    us: float
    stage: str
    phase: str


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Every kernel, copy and fill of a Chrome trace, in order of time."""
    # Phase "X" marks complete events, which have a start and a duration. Times are microseconds on
    # one clock for host and device.
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    phases: list[Event] = []
    stages: dict[Any, list[Event]] = defaultdict(list)  # by thread
    # A kernel runs after its launching call has returned, perhaps in another stage's time. The
    # profiler gives both the same correlation id, so the launch says where the kernel belongs.
    launches: dict[Any, Event] = {}
    for event in events:
        if event.get("cat") in LAUNCHES:
            launches[_correlation(event)] = event
        elif event.get("cat") == "user_annotation" and event["name"].startswith(RANGE_PREFIX):
            is_phase = event["name"].startswith(PHASE_PREFIX)
            (phases if is_phase else stages[event.get("tid")]).append(event)
    # Calls that launch nothing have no id.
    launches.pop(None, None)
    found = []
    for event in sorted((e for e in events if e.get("cat") in GPU_WORK), key=lambda e: e["ts"]):
        # A trace that starts in the middle of a run may lack the launch. The kernel's own time is
        # then the best guess.
        launch = launches.get(_correlation(event), event)
        # Stages are looked up on the launching thread only: autograd's thread has ranges of its own
        # that overlap in time. Phases are not, because they were opened on the main thread.
        stage = _innermost(stages[launch.get("tid")], launch["ts"]).removeprefix(RANGE_PREFIX)
        phase = _innermost(phases, launch["ts"]).removeprefix(PHASE_PREFIX)
        found.append(Kernel(event["name"], event["ts"], event["dur"], stage, phase))
    return found


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _innermost(ranges: Sequence[Event], moment: float) -> str:
    """The open range that began last."""
    opened = [each for each in ranges if each["ts"] <= moment <= each["ts"] + each["dur"]]
    # Ranges on one thread are nested, so the one that began last is the innermost.
    return str(max(opened, key=lambda each: each["ts"])["name"]) if opened else ""


def covered_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels ran; they come in order of time."""
    total, reached = 0.0, float("-inf")
    for kernel in kernels:
        # Kernels of several streams may overlap. Only the part behind everything counted so far is
        # new.
        end = kernel.start + kernel.us
        total += max(0.0, end - max(kernel.start, reached))
        reached = max(reached, end)
    return total


def total_us(kernels: Iterable[Kernel], by: str, calls: int) -> dict[str, float]:
    """Busy microseconds per call, summed by an attribute of `Kernel` ("name", "stage", "phase"),
    largest first.
    """
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[getattr(kernel, by)] += kernel.us / calls
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def short_name(kernel: str) -> str:
    """A kernel's name without return type, arguments and template parameters."""
    # C++ names of kernels fill a screen each.
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split("[(<]", name)[0][:60] or kernel
