"""Measure variants side by side: warmed up, interleaved, on rotating inputs; then profile each."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

import torch

from .. import __version__
from ..architectures import describe
from ..errors import SonicMoEError
from ..node.mlp_node import SonicMoEMlpNode
from ..routing.backends import arch_of
from .figures import Result, Spread, Sustained
from .floors import PEAKS_OF
from .shapes import Shape
from .steady import LAYERS, Stack, Steps, profile_steps, sustain, time_steps
from .timing import MIB, Phases, measure_memory, profile_phases, time_phases
from .trace import total_us
from .workload import Batch, Call, Layer, Variant, rotating_batches

PROFILED_CALLS = 5
STEADY_ROUNDS, STEADY_STEPS, PROFILED_STEPS = 5, 2, 3
TURNS = 2  # of each variant's sustained row, so that a drift of the machine falls on all of them
PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "deep-gemm")
Notify = Callable[[str], None]
Run = TypeVar("Run")
Figure = TypeVar("Figure")


def _silent(text: str) -> None:
    return None


@dataclass(frozen=True)
class Effort:
    """How long something is measured.

    rounds: timed runs of each contestant, interleaved with those of the others. warmup: untimed
    runs before them. layers: forwards of a step in the steady state, before its one backward.
    sustained_s: seconds of each sustained row; 0 leaves it out. nvtx: open NVTX ranges too, for
    Nsight.
    """

    rounds: int
    warmup: int
    layers: int = LAYERS
    sustained_s: float = 0.0
    nvtx: bool = False


class Contestant(Protocol):
    """One of those that are measured side by side: an engine's node, or another library."""

    def phases(self, number: int) -> Phases:
        """The phases of call `number`, in order of time."""

    def steps(self, layers: int) -> Steps:
        """A step of several layers."""


@dataclass
class NodeRun:
    """A node on rotating batches."""

    node: SonicMoEMlpNode
    batches: Sequence[Batch]

    def phases(self, number: int) -> Phases:
        # Another batch in every call, so that none comes out of the L2 cache.
        return Call(self.node, self.batches[number % len(self.batches)]).phases

    def steps(self, layers: int) -> Steps:
        return Stack(self.node, self.batches, layers)


def find_device() -> str:
    """ "cuda:0" where PyTorch sees a GPU, else "cpu"."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def measure(
    shape: Shape, variants: Sequence[Variant], effort: Effort, notify: Notify = _silent
) -> list[Result]:
    """One result per variant, in order; an engine that refuses these sizes yields a result that
    says so. `notify` is called with the name of each measurement as it starts.
    """
    device = find_device()
    layer = Layer(shape, device)
    batches = rotating_batches(shape, device)
    results = [result_of(shape, variant, device) for variant in variants]
    nodes: dict[int, SonicMoEMlpNode] = {}
    for index, variant in enumerate(variants):
        notify(f"{shape}: warming up {variant}")
        # A variant that cannot run at these sizes becomes a line in the report, and the others go
        # on.
        try:
            nodes[index] = warmed_up(layer, variant, batches, effort.warmup)
            results[index].gradient_mib = nodes[index].gradient_bytes / MIB
        except (SonicMoEError, torch.OutOfMemoryError) as error:
            results[index].refusal = " ".join(str(error).split())
    time_all(
        {index: NodeRun(node, batches) for index, node in nodes.items()},
        results,
        effort,
        device,
        lambda text: notify(f"{shape}: {text}"),
    )
    for index, node in nodes.items():
        notify(f"{shape}: memory of {variants[index]}")
        _measure_memory(node, results[index], batches[0], device)
        # Free accumulators and prepared weights, so that the peak of the next variant is its own.
        node.step()
        node.release_grads()
        node.invalidate_caches()
    return results


def result_of(shape: Shape, variant: Variant, device: str) -> Result:
    """A result without figures."""
    peaks = device == "cpu" or arch_of(device) == PEAKS_OF.name
    return Result(shape, str(variant), variant.fp8, device != "cpu", peaks)


def warmed_up(
    layer: Layer, variant: Variant, batches: Sequence[Batch], calls: int
) -> SonicMoEMlpNode:
    """The variant's node behind `calls` calls, at least one: the first compiles, quantises weights,
    and allocates accumulators where gradients cannot go straight into `main_grad`.
    """
    node = layer.node(variant)
    for number in range(max(1, calls)):
        time_phases(NodeRun(node, batches).phases(number), layer.device)
    return node


def time_all(
    runs: Mapping[int, Contestant],
    results: Sequence[Result],
    effort: Effort,
    device: str,
    notify: Notify = _silent,
) -> None:
    """Put the times of every run into the result of the same index. All of them have run before."""
    notify(f"{effort.rounds} rounds of {len(runs)} engines")
    _time_interleaved(runs, results, effort.rounds, device)
    stacks = {index: run.steps(effort.layers) for index, run in runs.items()}
    if device != "cpu":
        _time_steady(stacks, results, min(effort.rounds, STEADY_ROUNDS), device)
    for index, run in runs.items():
        notify(f"profiling {results[index].variant}")
        _profile(run, results[index], device, effort.nvtx)
    if effort.sustained_s:
        # Behind everything that is short, because it heats the GPU.
        notify(f"{effort.sustained_s:g} s of each of {len(runs)} engines, sustained")
        _time_sustained(stacks, results, effort.sustained_s, device)


def _in_turns(
    runs: Mapping[int, Run], rounds: int, once: Callable[[Run, int], Figure]
) -> dict[int, list[Figure]]:
    """`once(run, round)` of every run per round; the order turns round by round, so that no run
    always follows the same one. A run that does not fit into memory is left out.
    """
    # Clocks and temperature drift during a measurement. Taking turns spreads the drift over all
    # runs, so their ratio is good even where their absolute times are not.
    found: dict[int, list[Figure]] = {index: [] for index in runs}
    for number in range(rounds):
        for index in list(found) if number % 2 == 0 else list(reversed(found)):
            try:
                found[index].append(once(runs[index], number))
            except torch.OutOfMemoryError:  # several layers' activations at once; single calls fit
                del found[index]  # the loop goes over a copy
    return found


def _time_interleaved(
    runs: Mapping[int, Contestant], results: Sequence[Result], rounds: int, device: str
) -> None:
    times = _in_turns(runs, rounds, lambda run, number: time_phases(run.phases(number), device))
    for index in runs.keys() - times.keys():
        # It ran in the warm-up. Beside the memory of the others it does not fit.
        results[index].refusal = "out of memory beside the others"
    for index, calls in times.items():
        for clock in ("wall", "host"):
            spreads = {
                name: Spread.of([getattr(call[name], clock) for call in calls]) for name in calls[0]
            }
            # Summed per run and not from the medians, because the two phases of one run share its
            # clock speed.
            pairs = [
                getattr(call["forward"], clock) + getattr(call["backward"], clock) for call in calls
            ]
            setattr(results[index], clock, {**spreads, "pair": Spread.of(pairs)})


def _time_steady(
    stacks: Mapping[int, Steps], results: Sequence[Result], rounds: int, device: str
) -> None:
    """Wall time per layer of steps back to back, in interleaved rounds; then busy time of such
    steps.
    """
    times = _in_turns(stacks, rounds, lambda stack, _: time_steps(stack, STEADY_STEPS, device))
    for index, rows in times.items():
        results[index].steady = Spread.of([us for row in rows for us in row])
        busy = profile_steps(stacks[index], PROFILED_STEPS)
        results[index].steady_busy = Spread.of(busy) if busy else None


def _time_sustained(
    stacks: Mapping[int, Steps], results: Sequence[Result], seconds: float, device: str
) -> None:
    """Time, clock, power and energy per layer of steps back to back for seconds, in turns."""
    turns = _in_turns(stacks, TURNS, lambda stack, _: sustain(stack, seconds / TURNS, device))
    for index, rows in turns.items():
        results[index].sustained = Sustained.of(rows)


def _measure_memory(node: SonicMoEMlpNode, result: Result, batch: Batch, device: str) -> None:
    # On one batch, because memory does not depend on the values.
    memory = measure_memory(Call(node, batch), device)
    result.saved_mib, result.peak_mib = memory.saved, memory.peak
    result.total_peak_mib = memory.total_peak


def _profile(run: Contestant, result: Result, device: str, nvtx: bool) -> None:
    """Kernel times of several calls, of which a CPU has none."""
    if device == "cpu":
        return
    calls = [run.phases(number) for number in range(PROFILED_CALLS)]
    kernels = profile_phases(calls, nvtx)
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
        "versions": {
            "sonicmoe": __version__, "torch": torch.__version__, "cuda": torch.version.cuda,
            **{name: found for name in PACKAGES if (found := _installed(name))},
        },
    }  # fmt: skip


def _installed(distribution: str) -> str | None:
    try:
        # Kernels come from these packages, so a figure without their versions cannot be repeated.
        return version(distribution)
    except PackageNotFoundError:
        return None
