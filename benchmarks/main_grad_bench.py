#!/usr/bin/env python3
"""Time optimizer steps of a node whose weight gradients go straight into `main_grad`
(`flush="auto"`) against one that collects them for `step()` (`flush="step"`).

    python benchmarks/main_grad_bench.py [--json FILE]
    python benchmarks/main_grad_bench.py --check     # tiny sizes on the reference engine, no GPU

A step is forward and backward of every micro-batch, `node.step()`, and the preparation of the
weights in the next forward. Both nodes have the same parameters and take turns, so that they see
the same clocks. Before anything is timed, their gradients are compared.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sonicmoe.bench.runner import machine
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import time_steps
from sonicmoe.bench.timing import MIB, profile_phases
from sonicmoe.bench.trace import total_us
from sonicmoe.bench.workload import Batch, Call, Layer, Variant, rotating_batches
from sonicmoe.enums import EngineName, FlushMode
from sonicmoe.ernie_compat import SonicMoEMlpNode

Tensor = torch.Tensor
SHAPES = (
    Shape(8192, 3072, 1536, 8, 8),
    Shape(8192, 3072, 1536, 32, 8),
    Shape(16384, 2048, 768, 128, 8),
)
TINY = (Shape(48, 32, 16, 4, 2),)
MICRO_BATCHES, TINY_MICRO_BATCHES = (1, 4, 16), (1, 3)
WAYS = (FlushMode.AUTO, FlushMode.STEP)
ARRANGEMENTS = ("own", "stacked")  # a parameter of each expert's projection; one of all experts
TIMED_FORWARDS = 8  # at least so many between two looks at the clock
PROFILED = 3
HOST_CALLS, HOST_TOKENS = 100, 128
LAYER = "T, H, I, E, K, parameters"
STEP_HEADS = (LAYER, "micro-batches", "direct, us", "step, us", "step / direct")
WAY_HEADS = (LAYER, "flush", "wgrad us", "flush us", "held MiB", "peak MiB", "host us of step()")
ROUNDING = 1e-5  # relative, of sums of 16 micro-batches in fp32


@dataclass
class Figures:
    """One node at one shape. Times in microseconds, memory in MiB; None where there is no GPU.

    steps: of one step, by its number of micro-batches. wgrad: both weight-gradient GEMMs of one
    backward. flush: of one `step()`. held: gradients that the node holds. peak: the allocator's,
    with weights and `main_grad`, of a process that has this node alone. host: of `node.step()`.
    """

    steps: dict[int, float] = field(default_factory=dict)
    wgrad: float | None = None
    flush: float | None = None
    held: float = 0.0
    peak: float | None = None
    host: float = 0.0


class Experts:
    """The parameters of one shape with their `main_grad`, and nodes on them."""

    def __init__(self, shape: Shape, arrangement: str, variant: Variant, device: str) -> None:
        """Random weights, gradients of zeros."""
        self._layer, self._variant, self._stacked = Layer(shape, device), variant, None
        self.weights = [w for expert in self._layer.experts for w in expert.parameters()]
        if arrangement == "stacked":
            # The first of each pair is the up-projection's.
            halves = (torch.stack([w.detach() for w in self.weights[n::2]]) for n in range(2))
            self._stacked = [torch.nn.Parameter(half) for half in halves]
            self._layer.experts, self.weights = [], self._stacked
            for weight in self.weights:
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def node(self, way: FlushMode) -> SonicMoEMlpNode:
        """A node whose gradients go that way."""
        if self._stacked is None:
            return self._layer.node(self._variant, way)
        return SonicMoEMlpNode.from_fused(*self._stacked, config=self._variant.config, flush=way)

    @torch.no_grad()
    def clear(self) -> None:
        """As an optimizer does after its step."""
        for weight in self.weights:
            weight.main_grad.zero_()  # type: ignore[attr-defined]


class OptimizerStep:
    """One step of `micro_batches`; a `Stack` of one layer for `time_steps`."""

    layers = 1

    def __init__(self, node: SonicMoEMlpNode, batches: Sequence[Batch], micro_batches: int) -> None:
        """Nothing runs yet; batches are used in turn."""
        self._node, self._batches, self._count = node, batches, micro_batches

    def run(self) -> None:
        """Waits for nothing."""
        for number in range(self._count):
            call = Call(self._node, self._batches[number % len(self._batches)])
            call.forward()
            call.backward()
        self._node.step()


def compare(experts: Experts, batches: Sequence[Batch], micro_batches: int) -> None:
    """Both ways leave the same gradients: the same bits after one micro-batch, else to fp32
    rounding.
    """
    left: list[list[Tensor]] = []
    for way in WAYS:
        node = experts.node(way)
        experts.clear()
        OptimizerStep(node, batches, micro_batches).run()
        left.append([weight.main_grad.clone() for weight in experts.weights])  # type: ignore[attr-defined]
    for direct, step in zip(*left, strict=True):
        error, size = float((direct - step).norm()), float(step.norm())
        # Norms, in which sums below the smallest normal number, which additions in memory flush to
        # zero, do not show. An expert without tokens has gradients of zero.
        if not error <= (0 if micro_batches == 1 else ROUNDING) * size:
            raise RuntimeError(f"gradients of the two ways differ by {error:.1e} of {size:.1e}")


def measure_memory(experts: Experts, batches: Sequence[Batch], device: str) -> list[Figures]:
    """A node after the other, because what one holds would be in the peak of the other."""
    every = []
    for way in WAYS:
        node, figures = experts.node(way), Figures()
        free()
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):  # the second time, everything that is kept is there
            OptimizerStep(node, batches, 2).run()
        figures.held = node.gradient_bytes / MIB
        if device != "cpu":
            torch.cuda.synchronize()
            figures.peak = torch.cuda.max_memory_allocated() / MIB
        every.append(figures)
        del node
        free()
    return every


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_steps(
    nodes: Sequence[SonicMoEMlpNode],
    every: Sequence[Figures],
    batches: Sequence[Batch],
    rounds: int,
    counts: Sequence[int],
    device: str,
) -> None:
    """Median time of a step of each count of micro-batches, in rounds that turn their order."""
    for count in counts:
        steps = [OptimizerStep(node, batches, count) for node in nodes]
        times: list[list[float]] = [[] for _ in nodes]
        for number in range(rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                timed = max(1, TIMED_FORWARDS // count)
                times[index] += time_steps(steps[index], timed, device)  # type: ignore[arg-type]
        for figures, found in zip(every, times, strict=True):
            figures.steps[count] = statistics.median(found)


def measure_stages(
    nodes: Sequence[SonicMoEMlpNode], every: Sequence[Figures], batches: Sequence[Batch]
) -> None:
    """GPU time of the weight-gradient GEMMs and of the flush, median over profiles that take
    turns. Left out where the driver lets nobody profile.
    """
    found: list[list[dict[str, float]]] = [[] for _ in nodes]
    for _ in range(PROFILED):
        for node, stages in zip(nodes, found, strict=True):
            kernels = profile_phases([Call(node, batch).phases for batch in batches])
            stages.append(total_us(kernels, "stage", len(batches)))
    for figures, stages in zip(every, found, strict=True):
        if all("dw1" in each for each in stages):
            figures.wgrad = statistics.median(each["dw1"] + each["dw2"] for each in stages)
            figures.flush = statistics.median(each.get("flush", 0.0) for each in stages)


def measure_host(
    nodes: Sequence[SonicMoEMlpNode],
    every: Sequence[Figures],
    shape: Shape,
    device: str,
    calls: int,
) -> None:
    """Median host time of `node.step()` behind a backward, on an idle device; it does not depend on
    the number of tokens.
    """
    batch = Batch.random(replace(shape, tokens=min(shape.tokens, HOST_TOKENS)), device)
    for node, figures in zip(nodes, every, strict=True):
        times = []
        for _ in range(calls + 10):
            call = Call(node, batch)
            call.forward()
            call.backward()
            if device != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            node.step()
            times.append(1e6 * (time.perf_counter() - began))
        figures.host = statistics.median(times[10:])


def measure(
    shape: Shape, arrangement: str, variant: Variant, device: str, rounds: int, check: bool
) -> list[Figures]:
    """Figures of both ways, in the order of `WAYS`."""
    experts, batches = Experts(shape, arrangement, variant, device), rotating_batches(shape, device)
    counts = TINY_MICRO_BATCHES if check else MICRO_BATCHES
    for count in (1, counts[-1]):
        compare(experts, batches, count)
    every = measure_memory(experts, batches, device)
    nodes = [experts.node(way) for way in WAYS]
    measure_steps(nodes, every, batches, rounds, counts, device)
    if device != "cpu":
        measure_stages(nodes, every, batches)
    measure_host(nodes, every, shape, device, 5 if check else HOST_CALLS)
    return every


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def number(value: float | None, form: str = ",.0f") -> str:
    """A cell."""
    return "–" if value is None else format(value, form)


def step_rows(name: str, direct: Figures, step: Figures) -> list[list[str]]:
    """A row for each number of micro-batches."""
    return [
        [
            name,
            str(count),
            number(direct.steps[count]),
            number(step.steps[count]),
            f"{step.steps[count] / direct.steps[count]:.3f}",
        ]
        for count in direct.steps
    ]


def way_rows(name: str, every: Sequence[Figures]) -> list[list[str]]:
    """A row for each way."""
    return [
        [
            name,
            way.value,
            number(each.wgrad),
            number(each.flush),
            number(each.held, ",.1f"),
            number(each.peak),
            number(each.host, ",.1f"),
        ]
        for way, each in zip(WAYS, every, strict=True)
    ]


@click.command()
@click.option("--check", is_flag=True, help="Tiny sizes, reference engine, no GPU.")
@click.option("--rounds", default=7, show_default=True, help="Turns of each node.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
def main(check: bool, rounds: int, json_path: Path | None) -> None:
    """Print two tables: time of a step, and what else differs."""
    device = "cpu" if check else "cuda:0"
    variant = Variant(EngineName.REFERENCE if check else EngineName.HOPPER, "perf")
    facts: dict[str, Any] = machine()
    steps, ways, report = [], [], []
    for shape in TINY if check else SHAPES:
        for arrangement in ARRANGEMENTS:
            every = measure(shape, arrangement, variant, device, rounds, check)
            name = f"{', '.join(map(str, vars(shape).values()))}, {arrangement}"
            steps += step_rows(name, *every)
            ways += way_rows(name, every)
            both = {way.value: asdict(each) for way, each in zip(WAYS, every, strict=True)}
            report.append({"shape": vars(shape), "arrangement": arrangement, **both})
            free()
    click.echo(f"{variant} on {facts['device']}, {facts['date']}, torch {torch.__version__}\n")
    click.echo(f"{table(STEP_HEADS, steps)}\n\n{table(WAY_HEADS, ways)}")
    if json_path:
        every_figure = {"machine": facts, "figures": report}
        json_path.write_text(json.dumps(every_figure, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
