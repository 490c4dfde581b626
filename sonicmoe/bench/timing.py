"""What one run of a workload took: GPU time of its kernels from the profiler, peak and saved bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..observe import ranges_on
from .trace import PHASE_PREFIX, Kernel, kernels_of
from .workload import Call

Phases = Sequence[tuple[str, Callable[[], None]]]
MIB = float(1 << 20)


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
    """Bytes of distinct tensors that autograd holds after forward."""
    held: dict[int, Any] = {}  # by address: a tensor that autograd saves twice counts once

    def pack(tensor: Any) -> Any:
        held[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call.forward()
    inputs = {tensor.data_ptr() for tensor in call.inputs}
    return sum(tensor.nbytes for pointer, tensor in held.items() if pointer not in inputs)
