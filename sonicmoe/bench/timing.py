"""Clocks: wall time per phase from CUDA events (host clock on a CPU), busy time from the profiler,
peak and saved bytes.

Nothing here waits for the device inside a measured interval.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..observe import ranges_on
from .trace import PHASE_PREFIX, Kernel, kernels_of
from .workload import Call

Phases = Sequence[tuple[str, Callable[[], None]]]
MIB = float(1 << 20)
CLOCK_QUERY = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


@dataclass(frozen=True)
class PhaseTime:
    """One run of one phase in microseconds: `wall` by the device's clock, `host` until the
    launching calls returned.
    """

    wall: float
    host: float


def time_phases(phases: Phases, device: str) -> dict[str, PhaseTime]:
    """Run the phases once, in order, on an idle device."""
    if device == "cpu":
        return {name: _host_timed(run) for name, run in phases}
    # Events are recorded into the stream between the phases and read after the last one. The device
    # takes the time stamps, so nothing has to wait in between.
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]
    host = []
    marks[0].record()
    for (_, run), mark in zip(phases, marks[1:], strict=True):
        began = time.perf_counter()
        run()
        host.append(1e6 * (time.perf_counter() - began))
        mark.record()
    torch.cuda.synchronize()
    walls = [1e3 * first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
    return {
        name: PhaseTime(wall, spent)
        for (name, _), wall, spent in zip(phases, walls, host, strict=True)
    }


def _host_timed(run: Callable[[], None]) -> PhaseTime:
    began = time.perf_counter()
    run()
    spent = 1e6 * (time.perf_counter() - began)
    return PhaseTime(spent, spent)


def profile_phases(calls: Sequence[Phases], nvtx: bool) -> list[Kernel]:
    """GPU work of several calls, from the profiler (CUPTI); every phase is synchronised, stages
    carry their ranges.
    """
    # CPU activity brings the ranges and the launches, which `trace` needs to name the stage of a
    # kernel.
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler, stage_ranges(nvtx):
        for phases in calls:
            for name, run in phases:
                # The synchronisation is inside the phase's range, so no kernel of this phase runs
                # in the time of the next one.
                with torch.profiler.record_function(PHASE_PREFIX + name):
                    run()
                    torch.cuda.synchronize()
    return kernels_of(trace_of(profiler))


def trace_of(profiler: Any) -> dict[str, Any]:
    """The Chrome trace of a profiler that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return dict(json.loads(path.read_text()))


def stage_ranges(nvtx: bool) -> AbstractContextManager[None]:
    """Every stage becomes a range of torch's profiler; with `nvtx` also one that Nsight shows."""

    @contextmanager
    def both(name: str) -> Iterator[None]:
        with (
            torch.profiler.record_function(name),
            torch.cuda.nvtx.range(name) if nvtx else nullcontext(),
        ):
            yield

    return ranges_on(both)


@dataclass(frozen=True)
class Memory:
    """MiB of one forward and backward: `peak` above the memory allocated before, `saved` between
    the two passes.

    `saved` leaves out `out` and the caller's own tensors (x, probabilities, indices, weights).
    `total_peak` is absolute and None on a CPU, as `peak` is.
    """

    saved: float
    peak: float | None = None
    total_peak: float | None = None


def measure_memory(call: Call, device: str) -> Memory:
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
    return Memory(saved / MIB, (peak - before) / MIB, peak / MIB)


def _saved_bytes(call: Call) -> int:
    """Bytes of distinct tensors that autograd holds after forward, and of a z that the node holds
    beside them.
    """
    held: dict[int, Any] = {}  # by address: a tensor that autograd saves twice counts once

    def pack(tensor: Any) -> Any:
        held[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call.forward()
    assert call.out is not None
    # The node may hold z itself instead of saving it through autograd; hooks do not see it then.
    z = getattr(call.out.grad_fn, "own_z", None)
    for tensor in () if z is None else (getattr(z, "codes", z), getattr(z, "scale_inv", None)):
        if tensor is not None:
            pack(tensor)
    inputs = {t.data_ptr() for t in call.inputs}
    return sum(t.numel() * t.element_size() for pointer, t in held.items() if pointer not in inputs)


def clock_state() -> dict[str, str]:
    """Clocks, power and temperature now, as the driver reports them; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={CLOCK_QUERY}", "--format=csv,noheader", "-i", "0"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(
        zip(CLOCK_QUERY.split(","), (part.strip() for part in answer.split(",")), strict=False)
    )
