"""What runs took: calls by the host's clock and in turns, GPU time of their kernels from the profiler,
peak and saved bytes, and steps in the steady state.

Steady state is the cost of one layer in a training step whose launches never wait for the GPU: the
forwards of several layers, one `backward()` for all of them, and the next step issued at once
(`workload.Stack`). A few such steps see the clocks of a burst; `sustain` issues them for seconds,
until power and clocks are those of a training run.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..observe import ranges_on
from .figures import Turn
from .power import Meter
from .trace import PHASE_PREFIX, Kernel, covered_us, kernels_of
from .workload import NodeCall, Stack

Phases = Sequence[tuple[str, Callable[[], None]]]
MIB = float(1 << 20)
# Long enough for the power regulation, which takes a few tenths of a second, and for drivers that
# report power as its mean over the last second.
SETTLE_S = 1.0
AHEAD = 2  # steps that the host may be ahead of the GPU, which so never waits for the host
Key = TypeVar("Key")
Run = TypeVar("Run")
Figure = TypeVar("Figure")


def wait(device: str | torch.device) -> None:
    """Let the device finish."""
    if str(device) != "cpu":
        torch.cuda.synchronize()


def in_turns(
    runs: Mapping[Key, Run], rounds: int, once: Callable[[Run], Figure]
) -> dict[Key, list[Figure]]:
    """`once(run)` of every run per round; the order turns round by round, so that none always
    follows the same one. A run that does not fit into memory is left out.
    """
    # Clocks and temperature drift during a measurement. Taking turns spreads the drift over all
    # runs, so their ratio is good even where their absolute times are not.
    found: dict[Key, list[Figure]] = {key: [] for key in runs}
    for number in range(rounds):
        for key in list(found) if number % 2 == 0 else list(reversed(found)):
            try:
                found[key].append(once(runs[key]))
            except torch.OutOfMemoryError:  # several layers' activations at once; single calls fit
                del found[key]  # the loop goes over a copy
    return found


def wall_us(call: Callable[[], object], device: str | torch.device, calls: int) -> float:
    """Microseconds of a call by the host's clock, in a row of calls between two waits."""
    wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return 1e6 * (time.perf_counter() - began) / calls


def busy_us(call: Callable[[], object], device: str | torch.device, calls: int) -> float:
    """Microseconds of a call in which the GPU ran anything; overlapping work counts once. 0 on a CPU,
    and where the driver lets nobody profile.
    """
    if str(device) == "cpu":
        return 0.0
    wait(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        wait(device)
    return covered_us(kernels_of(trace_of(profiler))) / calls


def peak_mib(call: Callable[[], object], device: str | torch.device) -> float:
    """MiB at the peak of one call, above what lies there before it; 0 on a CPU."""
    if str(device) == "cpu":
        return 0.0
    wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait(device)
    return float(torch.cuda.max_memory_allocated() - before) / MIB


def profile_phases(calls: Sequence[Phases]) -> list[Kernel]:
    """GPU work of several calls, from the profiler (CUPTI); every phase is synchronised, stages
    carry their ranges. Empty where the driver lets nobody profile.
    """
    # CPU activity brings the ranges and the launches, which `trace` needs to name the stage of a
    # kernel.
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    ranges = torch.profiler.record_function
    with torch.profiler.profile(activities=activities) as profiler, ranges_on(ranges):
        for phases in calls:
            for name, run in phases:
                # The synchronisation is inside the phase's range, so no kernel of this phase runs
                # in the time of the next one.
                with ranges(PHASE_PREFIX + name):
                    run()
                    torch.cuda.synchronize()
    return kernels_of(trace_of(profiler))


def trace_of(profiler: Any) -> dict[str, Any]:
    """The Chrome trace of a profiler that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return dict(json.loads(path.read_text()))


@dataclass(frozen=True)
class Memory:
    """MiB of one forward and backward: `peak` above the memory allocated before, `saved` between
    the two passes.

    `saved` leaves out `out` and the caller's own tensors (x, probabilities, indices, weights). `peak`
    is None on a CPU.
    """

    saved: float
    peak: float | None = None


def measure_memory(call: NodeCall, device: str) -> Memory:
    """Run forward and backward once. What the node keeps for gradients must exist already."""
    if device == "cpu":
        saved = _saved_bytes(call)
        call.backward()
        return Memory(saved / MIB)
    # An output or gradients of an earlier call would be freed in the middle and lower the figure.
    call.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.forward()
    assert call.out is not None
    # The output is the caller's from here on, so it is not memory that the node saves for backward.
    saved = torch.cuda.memory_allocated() - before - call.out.numel() * call.out.element_size()
    call.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return Memory(saved / MIB, (peak - before) / MIB)


def _saved_bytes(call: NodeCall) -> int:
    """Bytes of distinct tensors that autograd holds after forward."""
    held: dict[int, Any] = {}  # by address: a tensor that autograd saves twice counts once

    def pack(tensor: Any) -> Any:
        held[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call.forward()
    inputs = {tensor.data_ptr() for tensor in call.inputs}
    return sum(tensor.nbytes for pointer, tensor in held.items() if pointer not in inputs)


class Clock:
    """Durations between marks on `device`. A GPU takes the time stamps itself, and a mark waits for
    the one `AHEAD` before it, so that launches never queue up; a CPU has the host's clock.
    """

    def __init__(self, device: str) -> None:
        self._host = device == "cpu"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._host:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)
        if len(self._marks) > AHEAD:
            self._marks[-1 - AHEAD].synchronize()

    def forget(self) -> None:
        """Only the last mark so far, and those that follow, count."""
        del self._marks[:-1]

    def durations(self) -> list[float]:
        """In seconds."""
        pairs = list(itertools.pairwise(self._marks))
        if self._host:
            return [b - a for a, b in pairs]
        # The last mark has to have happened before anybody can read it.
        torch.cuda.synchronize()
        return [1e-3 * a.elapsed_time(b) for a, b in pairs]


def time_steps(stack: Stack, steps: int, device: str) -> list[float]:
    """Microseconds per layer of `steps` steps, issued behind one that is not timed; on a CPU by the
    host's clock.
    """
    clock = Clock(device)
    # The first step fills the stream, so the GPU has work when the first mark is recorded behind
    # it.
    for _ in range(steps + 1):
        stack.run()
        clock.mark()
    return [1e6 * seconds / stack.layers for seconds in clock.durations()]


def profile_steps(stack: Stack, steps: int) -> float | None:
    """Microseconds per layer in which the GPU worked, the mean of `steps` steps behind one that is
    left out; None without a profiler.

    Work that overlaps counts once: wall time can never be below it.
    """
    stack.run()
    return busy_us(stack.run, "cuda", steps) / stack.layers or None


def sustain(stack: Stack, seconds: float, device: str, settle_s: float = SETTLE_S) -> Turn:
    """Steps for `settle_s` seconds that do not count, while power and clocks settle, then for
    `seconds` that do; at least one counts.
    """
    clock = Clock(device)
    _run_for(stack, settle_s, clock.mark)
    clock.forget()
    with Meter(device) as meter:
        _run_for(stack, seconds, clock.mark)
    return [1e6 * step / stack.layers for step in clock.durations()], meter.reading()


def _run_for(stack: Stack, seconds: float, mark: Callable[[], None]) -> None:
    began = time.perf_counter()
    while True:
        stack.run()
        mark()
        # Asked behind the step, so that at least one is issued.
        if time.perf_counter() - began >= seconds:
            return
