"""Measure variants side by side: warmed up, in turns, on rotating inputs; then profile each."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__
from ..architectures import describe
from ..errors import SonicMoEError
from ..jit.key import package_versions
from ..node.mlp_node import SonicMoEMlpNode
from ..routing.backends import arch_of, find_device
from .figures import Result, Spread, Sustained
from .floors import PEAKS_OF
from .shapes import Shape
from .timing import (
    Phases,
    in_turns,
    measure_memory,
    profile_phases,
    profile_steps,
    sustain,
    time_steps,
)
from .trace import total_us
from .workload import Batch, Layer, NodeCall, Stack, Variant, rotating_batches

WARM_UPS = 2
PROFILED_CALLS = 5
STEADY_ROUNDS, STEADY_STEPS, PROFILED_STEPS = 5, 2, 3
HOST_ROUNDS = 1  # a step takes seconds there, and nobody decides by its time
TURNS = 2  # of a sustained row
PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "deep-gemm")


@dataclass
class NodeRun:
    """A node on rotating batches. `time_all` takes anything else that has these two methods too."""

    node: SonicMoEMlpNode
    batches: Sequence[Batch]

    def phases(self, number: int) -> Phases:
        # Another batch in every call, so that none comes out of the L2 cache.
        return NodeCall(self.node, self.batches[number % len(self.batches)]).phases

    def steps(self, layers: int) -> Stack:
        return Stack(self.node, self.batches, layers)


def measure(shape: Shape, variants: Sequence[Variant], sustained_s: float = 0.0) -> list[Result]:
    """One result per variant, in order; an engine that refuses these sizes yields a result that
    says so. sustained_s: seconds of each sustained row; 0 leaves it out.
    """
    device = find_device()
    layer = Layer(shape, device)
    batches = rotating_batches(shape, device)
    results = [result_of(shape, variant, device) for variant in variants]
    runs: dict[int, NodeRun] = {}
    for index, variant in enumerate(variants):
        # A variant that cannot run at these sizes becomes a line in the report, and the others go
        # on.
        try:
            runs[index] = warmed_up(layer, variant, batches)
        except (SonicMoEError, torch.OutOfMemoryError) as error:
            results[index].refusal = " ".join(str(error).split())
    time_all(runs, results, device, sustained_s)
    for index, run in runs.items():
        # On one batch, because memory does not depend on the values.
        memory = measure_memory(NodeCall(run.node, batches[0]), device)
        results[index].saved_mib, results[index].peak_mib = memory.saved, memory.peak
        # Free prepared weights, so that the peak of the next variant is its own.
        run.node.invalidate_caches()
    return results


def result_of(shape: Shape, variant: Variant, device: str) -> Result:
    """A result without figures."""
    peaks = device == "cpu" or arch_of(device) == PEAKS_OF.name
    card = "" if device == "cpu" else torch.cuda.get_device_name(device)
    return Result(shape, str(variant), variant.fp8, device != "cpu", peaks, card=card)


def warmed_up(layer: Layer, variant: Variant, batches: Sequence[Batch]) -> NodeRun:
    """The variant behind a few calls: the first compiles and quantises weights."""
    run = NodeRun(layer.node(variant), batches)
    for number in range(WARM_UPS):
        for _, phase in run.phases(number):
            phase()
    return run


def time_all(
    runs: Mapping[int, NodeRun],
    results: Sequence[Result],
    device: str,
    sustained_s: float = 0.0,
    layers: int | None = None,
) -> None:
    """Put the times of every run into the result of the same index. All of them have run before.
    layers: forwards of a step before its one backward; None: as many as suit the shape.
    """
    for index, run in runs.items() if device != "cpu" else ():
        profile(run, results[index])
    stacks = {
        index: run.steps(layers or results[index].shape.stack_layers) for index, run in runs.items()
    }
    _time_steady(stacks, results, device)
    if sustained_s:
        # Behind everything that is short, because it heats the GPU.
        _time_sustained(stacks, results, sustained_s, device)


def _time_steady(stacks: Mapping[int, Stack], results: Sequence[Result], device: str) -> None:
    """Wall time per layer of steps back to back, in turns; then busy time of such steps."""
    rounds = STEADY_ROUNDS if device != "cpu" else HOST_ROUNDS
    times = in_turns(stacks, rounds, lambda stack: time_steps(stack, STEADY_STEPS, device))
    for index, rows in times.items():
        results[index].steady = Spread.of([us for row in rows for us in row])
        if device != "cpu":
            results[index].steady_busy = profile_steps(stacks[index], PROFILED_STEPS)


def _time_sustained(
    stacks: Mapping[int, Stack], results: Sequence[Result], seconds: float, device: str
) -> None:
    """Time, clock, power and energy per layer of steps back to back for seconds, in turns."""
    turns = in_turns(stacks, TURNS, lambda stack: sustain(stack, seconds / TURNS, device))
    for index, rows in turns.items():
        results[index].sustained = Sustained.of(rows)


def profile(run: NodeRun, result: Result) -> None:
    """Put the kernel times of several calls into the result."""
    calls = [run.phases(number) for number in range(PROFILED_CALLS)]
    kernels = profile_phases(calls)
    if not kernels:
        return  # the driver lets nobody profile here; wall times must do
    phases = total_us(kernels, "phase", PROFILED_CALLS)
    result.busy = {name: phases.get(name, 0.0) for name, _ in calls[0]}
    result.stages = total_us(kernels, "stage", PROFILED_CALLS)
    result.kernels = total_us(kernels, "name", PROFILED_CALLS)


def machine() -> dict[str, Any]:
    """The machine, to be quoted with every figure: device, architecture, versions, date."""
    gpu = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0) if gpu else f"{platform.machine()} CPU",
        "architecture": describe(torch.cuda.get_device_capability(0)) if gpu else None,
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        # Kernels come from these packages, so a figure without their versions cannot be repeated.
        "versions": {
            "sonicmoe": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "absent",
            **dict(package_versions(*PACKAGES)),
        },
    }
