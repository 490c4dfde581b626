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
from typing import Any

import torch

from ..node.mlp_node import SonicMoEMlpNode
from .figures import Turn
from .power import Meter
from .timing import trace_of
from .trace import covered_us, kernels_of
from .workload import Batch

Tensor = torch.Tensor
# Long enough for the power regulation, which takes a few tenths of a second, and for drivers that
# report power as its mean over the last second.
SETTLE_S = 1.0
AHEAD = 2  # steps that the host may be ahead of the GPU, which so never waits for the host


class Stack:
    """Forwards of one node on `layers` batches, then one backward through all of them; gradients of
    tokens are dropped. What is timed here may be anything that has `layers` and `run`.
    """

    def __init__(self, node: SonicMoEMlpNode, batches: Sequence[Batch], layers: int) -> None:
        """Nothing runs yet; batches are used in turn."""
        self._node = node
        # Fewer batches than layers are used again; `_leaf` keeps their gradients apart.
        self._batches = list(itertools.islice(itertools.cycle(batches), layers))
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
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            stack.run()
        torch.cuda.synchronize()
    return covered_us(kernels_of(trace_of(profiler))) / steps / stack.layers or None


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
