"""Steady state: the cost of one layer in a training step whose launches never wait for the GPU.

A step here is like that of a model with many layers: the forwards of several layers, then one
`backward()` for all of them. PyTorch hands every `backward()` to a thread of the device, and waking
that thread can take half a millisecond. A model pays this once per step, and so does a `Stack`.
Steps are issued back to back, so the measurement never leaves the GPU idle. A few of them see the
clocks of a burst; `sustain` issues them for seconds, until power and clocks are those of a training
run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from ..node.mlp_node import SonicMoEMlpNode
from .figures import Turn
from .nvml import Meter, Nvml, NvmlError
from .timing import clock_of, trace_of
from .trace import covered_us, gpu_spans
from .workload import Batch

Tensor = torch.Tensor
LAYERS = 8
# Long enough for the power regulation, which takes a few tenths of a second, and for drivers that
# report power as its mean over the last second.
SETTLE_S = 1.0
AHEAD = 2  # steps that the host may be ahead of the GPU: it never waits, and no queue builds up


class Steps(Protocol):
    """Something that repeats a step of several layers."""

    layers: int

    def run(self) -> None:
        """Issue one step; wait for nothing."""


class Stack:
    """Forwards of one node on `layers` batches, then one backward through all of them; gradients of
    tokens are dropped.
    """

    def __init__(
        self, node: SonicMoEMlpNode, batches: Sequence[Batch], layers: int = LAYERS
    ) -> None:
        """Nothing runs yet; batches are used in turn."""
        self._node = node
        # Fewer batches than layers are used again; `_leaf` keeps their gradients apart.
        self._batches = [
            batch for batch, _ in zip(itertools.cycle(batches), range(layers), strict=False)
        ]
        self.layers = layers

    def run(self) -> None:
        """One step, issued; waits for nothing. Weight gradients add up where the node has them."""
        outs = [self._node(_leaf(b.x), b.counts, b.indices, _leaf(b.probs)) for b in self._batches]
        torch.autograd.backward(outs, [batch.dout for batch in self._batches])


def _leaf(tensor: Tensor) -> Tensor:
    """The same storage with a gradient of its own, so that layers which share a batch add nothing
    to each other's.
    """
    return tensor.detach().requires_grad_()


def time_steps(stack: Steps, steps: int, device: str) -> list[float]:
    """Microseconds per layer of `steps` steps, issued behind one that is not timed; on a CPU by the
    host's clock. The host never waits.
    """
    clock = clock_of(device)
    # The first step fills the stream, so the GPU has work when the first mark is recorded behind
    # it.
    for _ in range(steps + 1):
        stack.run()
        clock.mark()
    return [1e6 * seconds / stack.layers for seconds in clock.durations()]


def open_nvml(device: str) -> Nvml | str:
    """NVML of the benchmark's GPU, or why there is none."""
    if device == "cpu":
        return "no GPU"
    try:
        return Nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except NvmlError as error:
        return str(error)


def sustain(stack: Steps, seconds: float, device: str, settle_s: float = SETTLE_S) -> Turn:
    """Steps for `settle_s` seconds that do not count, while power and clocks settle, then for
    `seconds` that do; at least one counts.
    """
    clock, gpu = clock_of(device, AHEAD), open_nvml(device)
    meter = None if isinstance(gpu, str) else Meter(gpu)
    _run_for(stack, settle_s, clock.mark)
    clock.start()
    with meter or nullcontext():
        _run_for(stack, seconds, clock.mark)
    us = tuple(1e6 * step / stack.layers for step in clock.durations())
    try:
        return Turn(us, stack.layers, str(gpu) if meter is None else meter.reading())
    except NvmlError as error:
        return Turn(us, stack.layers, str(error))
    # Closed also where the meter failed, because NVML counts its users.
    finally:
        if not isinstance(gpu, str):
            gpu.close()


def _run_for(stack: Steps, seconds: float, mark: Callable[[], None]) -> None:
    began = time.perf_counter()
    while True:
        stack.run()
        mark()
        # Asked behind the step, so that at least one is issued.
        if time.perf_counter() - began >= seconds:
            return


def profile_steps(stack: Steps, steps: int) -> list[float]:
    """Microseconds per layer in which the GPU worked, of `steps` steps behind one that is left out;
    empty without a profiler.

    Work that overlaps counts once: wall time can never be below it.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps + 1):
            stack.run()
        torch.cuda.synchronize()
    return busy_per_step(gpu_spans(trace_of(profiler)), steps, stack.layers)


def busy_per_step(spans: Sequence[tuple[float, float]], steps: int, layers: int) -> list[float]:
    """Equal steps launch equally much, so the spans of `steps + 1` of them are cut by number; else
    one mean over all of them.
    """
    # The trace holds GPU work alone and marks no steps, so they are told apart by the number of
    # spans.
    count, surplus = divmod(len(spans), steps + 1)
    if not spans:
        return []
    # The steps launched unequally much, so nobody can tell where one ends.
    if surplus:
        return [covered_us(spans) / (steps + 1) / layers]
    return [
        covered_us(spans[number * count : (number + 1) * count]) / layers
        for number in range(1, steps + 1)
    ]
