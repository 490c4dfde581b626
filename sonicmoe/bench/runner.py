"""Measure variants side by side: warmed up, interleaved, on rotating inputs; then profile each."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .. import __version__
from ..errors import SonicMoEError
from ..node.mlp_node import SonicMoEMlpNode
from .figures import Result, Spread, Sustained, Turn
from .shapes import Shape
from .steady import LAYERS, Stack, open_nvml, profile_steps, sustain, time_steps
from .timing import MIB, PhaseTime, clock_state, measure_memory, profile_phases, time_phases
from .trace import total_us
from .workload import Batch, Call, Layer, Variant, rotating_batches

PROFILED_CALLS = 5
STEADY_ROUNDS, STEADY_STEPS, PROFILED_STEPS = 5, 2, 3
TURNS = 2  # of each variant's sustained row, so that a drift of the machine falls on all of them
PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
Notify = Callable[[str], None]


def find_device() -> str:
    """ "cuda:0" where PyTorch sees a GPU, else "cpu"."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def measure(
    shape: Shape,
    variants: Sequence[Variant],
    *,
    rounds: int,
    warmup: int,
    nvtx: bool = False,
    layers: int = LAYERS,
    sustained_s: float = 0.0,
    notify: Notify = lambda text: None,
) -> list[Result]:
    """One result per variant, in order; an engine that refuses these sizes yields a result that
    says so.

    Args:
        shape: sizes.
        variants: engines and modes to compare.
        rounds: timed runs per variant, interleaved with those of the others.
        warmup: untimed runs before them.
        nvtx: open NVTX ranges too, for Nsight.
        layers: forwards of a step in the steady state, before its one backward.
        sustained_s: seconds of the sustained row of each variant; 0 leaves it out.
        notify: called with the name of each measurement as it starts.
    """
    device = find_device()
    layer = Layer(shape, device)
    batches = rotating_batches(shape, device)
    results = [Result(shape, str(variant), variant.fp8, device != "cpu") for variant in variants]
    nodes: dict[int, SonicMoEMlpNode] = {}
    for index, variant in enumerate(variants):
        notify(f"{shape}: warming up {variant}")
        # A variant that cannot run at these sizes becomes a line in the report, and the others go
        # on.
        try:
            nodes[index] = layer.node(variant)
            # At least once: the first call compiles, quantises weights, and allocates accumulators
            # where gradients cannot go straight into `main_grad`.
            for number in range(max(1, warmup)):
                time_phases(Call(nodes[index], batches[number % len(batches)]).phases, device)
            results[index].gradient_mib = nodes[index].gradient_bytes / MIB
        except (SonicMoEError, torch.OutOfMemoryError) as error:
            nodes.pop(index, None)
            results[index].refusal = " ".join(str(error).split())
    notify(f"{shape}: {rounds} rounds of {len(nodes)} engines")
    _time_interleaved(nodes, results, batches, rounds, device)
    if device != "cpu":
        _time_steady(nodes, results, batches, min(rounds, STEADY_ROUNDS), layers, device)
    if sustained_s:
        notify(f"{shape}: {sustained_s:g} s of each of {len(nodes)} engines, sustained")
        _time_sustained(nodes, results, batches, sustained_s, layers, device)
    for index, node in nodes.items():
        notify(f"{shape}: profiling {variants[index]}")
        _examine(node, results[index], batches, device, nvtx)
        # Free accumulators and prepared weights, so that the peak of the next variant is its own.
        node.step()
        node.release_grads()
        node.invalidate_caches()
    return results


def _time_interleaved(
    nodes: dict[int, SonicMoEMlpNode],
    results: Sequence[Result],
    batches: Sequence[Batch],
    rounds: int,
    device: str,
) -> None:
    """Every round runs every variant once; the order turns round by round, so that no variant
    always follows the same one.
    """
    times: dict[int, list[dict[str, PhaseTime]]] = {index: [] for index in nodes}
    # Clocks and temperature drift during a measurement. Taking turns spreads the drift over all
    # variants, so their ratio is good even where their absolute times are not.
    for number in range(rounds):
        order = list(nodes) if number % 2 == 0 else list(reversed(nodes))
        for index in order:
            call = Call(nodes[index], batches[number % len(batches)])
            times[index].append(time_phases(call.phases, device))
    for index, runs in times.items():
        for clock in ("wall", "host"):
            spreads = {
                name: Spread.of([getattr(run[name], clock) for run in runs]) for name in runs[0]
            }
            # Summed per run and not from the medians, because the two phases of one run share its
            # clock speed.
            pairs = [
                getattr(run["forward"], clock) + getattr(run["backward"], clock) for run in runs
            ]
            setattr(results[index], clock, {**spreads, "pair": Spread.of(pairs)})


def _time_steady(
    nodes: dict[int, SonicMoEMlpNode],
    results: Sequence[Result],
    batches: Sequence[Batch],
    rounds: int,
    layers: int,
    device: str,
) -> None:
    """Wall time per layer of steps back to back, in interleaved rounds; then busy time of such
    steps. Left out where they do not fit.
    """
    stacks = {index: Stack(node, batches, layers) for index, node in nodes.items()}
    times: dict[int, list[float]] = {index: [] for index in stacks}
    for number in range(rounds):
        for index in list(stacks) if number % 2 == 0 else list(reversed(stacks)):
            try:
                times[index] += time_steps(stacks[index], STEADY_STEPS, device)
            except torch.OutOfMemoryError:  # several layers' activations at once; single calls fit
                # The loop goes over a copy of the keys, so removing one is safe.
                del stacks[index]
    for index, stack in stacks.items():
        results[index].steady = Spread.of(times[index])
        busy = profile_steps(stack, PROFILED_STEPS)
        results[index].steady_busy = Spread.of(busy) if busy else None


def _time_sustained(
    nodes: dict[int, SonicMoEMlpNode],
    results: Sequence[Result],
    batches: Sequence[Batch],
    seconds: float,
    layers: int,
    device: str,
) -> None:
    """Time, clock, power and energy per layer of steps back to back for seconds, in turns. Left out
    where they do not fit.
    """
    stacks = {index: Stack(node, batches, layers) for index, node in nodes.items()}
    turns: dict[int, list[Turn]] = {index: [] for index in stacks}
    gpu = open_nvml(device)
    for number in range(TURNS):
        for index in list(stacks) if number % 2 == 0 else list(reversed(stacks)):
            try:
                turns[index].append(sustain(stacks[index], seconds / TURNS, device, gpu))
            except torch.OutOfMemoryError:  # several layers' activations at once; single calls fit
                del stacks[index]
    for index in stacks:
        results[index].sustained = Sustained.of(turns[index])
    if not isinstance(gpu, str):
        gpu.close()


def _examine(
    node: SonicMoEMlpNode, result: Result, batches: Sequence[Batch], device: str, nvtx: bool
) -> None:
    """Memory of one call, then kernel times of several."""
    memory = measure_memory(Call(node, batches[0]), device)
    result.saved_mib, result.peak_mib, result.total_peak_mib = (
        memory.saved,
        memory.peak,
        memory.total_peak,
    )
    if device == "cpu":
        return
    calls = [Call(node, batches[number % len(batches)]).phases for number in range(PROFILED_CALLS)]
    kernels = profile_phases(calls, nvtx)
    if not kernels:
        return  # the driver lets nobody profile here; wall times must do
    phases = total_us(kernels, "phase", PROFILED_CALLS)
    result.busy = {name: phases.get(name, 0.0) for name, _ in calls[0]}
    result.stages = total_us(kernels, "stage", PROFILED_CALLS)
    result.kernels = total_us(kernels, "name", PROFILED_CALLS)


def machine() -> dict[str, Any]:
    """The machine, to be quoted with every figure: device, versions, clocks, date."""
    gpu = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0) if gpu else f"{platform.machine()} CPU",
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "versions": {
            "sonicmoe": __version__, "torch": torch.__version__, "cuda": torch.version.cuda,
            **{name: found for name in PACKAGES if (found := _installed(name))},
        },
        "clocks": clock_state(),
    }  # fmt: skip


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
