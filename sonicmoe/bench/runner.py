"""Measure variants side by side: warmed up, interleaved, on rotating inputs; then profile each."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from .. import __version__
from ..architectures import describe
from ..errors import SonicMoEError
from ..node.mlp_node import SonicMoEMlpNode
from ..routing.backends import arch_of
from . import deepgemm
from .figures import Result, Spread, Sustained, Turn
from .floors import PEAKS_OF
from .shapes import Shape
from .steady import LAYERS, Stack, Steps, open_nvml, profile_steps, sustain, time_steps
from .timing import (
    MIB,
    Phases,
    PhaseTime,
    clock_state,
    measure_memory,
    profile_phases,
    time_phases,
)
from .trace import total_us
from .workload import Batch, Call, Layer, Variant, rotating_batches

PROFILED_CALLS = 5
STEADY_ROUNDS, STEADY_STEPS, PROFILED_STEPS = 5, 2, 3
TURNS = 2  # of each variant's sustained row, so that a drift of the machine falls on all of them
PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "deep-gemm")
Notify = Callable[[str], None]


class Contestant(Protocol):
    """What is measured side by side: an engine's node, or a peer."""

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
        return Call(self.node, self.batches[number % len(self.batches)]).phases

    def steps(self, layers: int) -> Steps:
        return Stack(self.node, self.batches, layers)


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
    peer: bool = False,
    notify: Notify = lambda text: None,
) -> list[Result]:
    """One result per variant, in order; an engine that refuses these sizes yields a result that
    says so.

    With `peer`, on a GPU where `deep_gemm` is installed, a last one is of DeepGEMM's six bare GEMMs
    of such a layer, or says why they did not run.

    Args:
        shape: sizes.
        variants: engines and modes to compare.
        rounds: timed runs per variant, interleaved with those of the others.
        warmup: untimed runs before them.
        nvtx: open NVTX ranges too, for Nsight.
        layers: forwards of a step in the steady state, before its one backward.
        sustained_s: seconds of the sustained row of each variant; 0 leaves it out.
        peer: whether DeepGEMM takes part.
        notify: called with the name of each measurement as it starts.
    """
    device = find_device()
    layer = Layer(shape, device)
    batches = rotating_batches(shape, device)
    peaks = device == "cpu" or arch_of(device) == PEAKS_OF.name
    results = [
        Result(shape, str(variant), variant.fp8, device != "cpu", peaks) for variant in variants
    ]
    nodes: dict[int, SonicMoEMlpNode] = {}
    runs: dict[int, Contestant] = {}
    for index, variant in enumerate(variants):
        notify(f"{shape}: warming up {variant}")
        # A variant that cannot run at these sizes becomes a line in the report, and the others go
        # on.
        try:
            nodes[index] = layer.node(variant)
            # At least once: the first call compiles, quantises weights, and allocates accumulators
            # where gradients cannot go straight into `main_grad`.
            for number in range(max(1, warmup)):
                time_phases(NodeRun(nodes[index], batches).phases(number), device)
            results[index].gradient_mib = nodes[index].gradient_bytes / MIB
            runs[index] = NodeRun(nodes[index], batches)
        except (SonicMoEError, torch.OutOfMemoryError) as error:
            nodes.pop(index, None)
            results[index].refusal = " ".join(str(error).split())
    if peer and device != "cpu":
        notify(f"{shape}: compiling and checking {deepgemm.NAME}")
        _add_peer(runs, results, shape, batches, warmup, device)
    notify(f"{shape}: {rounds} rounds of {len(runs)} engines")
    _time_interleaved(runs, results, rounds, device)
    if device != "cpu":
        _time_steady(runs, results, min(rounds, STEADY_ROUNDS), layers, device)
    for index in list(runs):  # no name here may keep a run beyond `runs.clear()`
        notify(f"{shape}: profiling {results[index].variant}")
        _profile(runs[index], results[index], device, nvtx)
    if sustained_s:
        # Behind everything that is short, because it heats the GPU.
        notify(f"{shape}: {sustained_s:g} s of each of {len(runs)} engines, sustained")
        _time_sustained(runs, results, sustained_s, layers, device)
    # A peer's operands are no part of the engines' memory.
    runs.clear()
    for index, node in nodes.items():
        notify(f"{shape}: memory of {variants[index]}")
        _measure_memory(node, results[index], batches[0], device)
        # Free accumulators and prepared weights, so that the peak of the next variant is its own.
        node.step()
        node.release_grads()
        node.invalidate_caches()
    return results


def _add_peer(
    runs: dict[int, Contestant],
    results: list[Result],
    shape: Shape,
    batches: Sequence[Batch],
    warmup: int,
    device: str,
) -> None:
    """DeepGEMM's six GEMMs behind the engines, with the rows per expert of the same batches."""
    result = Result(shape, deepgemm.NAME, fp8=True, gpu=True, peer=True)
    try:
        library = deepgemm.load()
        if library is None:
            return
        six = deepgemm.prepare(library, shape, [batch.counts for batch in batches], device)
        for number in range(warmup):
            time_phases(six.phases(number), device)
        runs[len(results)] = six
    except deepgemm.PeerError as error:
        result.refusal = str(error)
    results.append(result)


def _time_interleaved(
    runs: dict[int, Contestant],
    results: Sequence[Result],
    rounds: int,
    device: str,
) -> None:
    """Every round runs every variant once; the order turns round by round, so that no variant
    always follows the same one.
    """
    times: dict[int, list[dict[str, PhaseTime]]] = {index: [] for index in runs}
    # Clocks and temperature drift during a measurement. Taking turns spreads the drift over all
    # variants, so their ratio is good even where their absolute times are not.
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(reversed(runs))
        for index in order:
            times[index].append(time_phases(runs[index].phases(number), device))
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
    runs: dict[int, Contestant],
    results: Sequence[Result],
    rounds: int,
    layers: int,
    device: str,
) -> None:
    """Wall time per layer of steps back to back, in interleaved rounds; then busy time of such
    steps. Left out where they do not fit.
    """
    stacks = {index: run.steps(layers) for index, run in runs.items()}
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
    runs: dict[int, Contestant],
    results: Sequence[Result],
    seconds: float,
    layers: int,
    device: str,
) -> None:
    """Time, clock, power and energy per layer of steps back to back for seconds, in turns. Left out
    where they do not fit.
    """
    stacks = {index: run.steps(layers) for index, run in runs.items()}
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


def _measure_memory(node: SonicMoEMlpNode, result: Result, batch: Batch, device: str) -> None:
    memory = measure_memory(Call(node, batch), device)
    result.saved_mib, result.peak_mib, result.total_peak_mib = (
        memory.saved,
        memory.peak,
        memory.total_peak,
    )


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
    """The machine, to be quoted with every figure: device and its architecture, versions, clocks,
    date.
    """
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
        "clocks": clock_state(),
    }  # fmt: skip


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
