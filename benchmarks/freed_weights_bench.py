#!/usr/bin/env python3
"""Measure the memory of a training step whose BF16 expert weights are freed while FP8 copies are in
use (`node.make_copies()`), against one that keeps them.

    python benchmarks/freed_weights_bench.py [--layers L] [--micro-batches M] [--json FILE]
    python benchmarks/freed_weights_bench.py --check     # tiny sizes on the reference engine, no GPU

A step is PaddleFleet's: an event quantises every layer, and the parameters of every layer are freed;
the forwards of all micro-batches, then their backwards, through L layers in a row; the copies are
dropped. `main_grad` is fp32 and there from the beginning. The peaks are those of the allocator, of a
process that holds nothing else. Every way must leave the same bits in `main_grad`.
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
from sonicmoe.bench.timing import MIB
from sonicmoe.bench.workload import Batch, Variant
from sonicmoe.enums import EngineName
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.weights.copies import WeightCopies

Tensor = torch.Tensor
SHAPES = (Shape(8192, 3072, 1536, 8, 8), Shape(8192, 3072, 1536, 32, 8))
TINY = (Shape(48, 64, 32, 4, 2),)
STEPS = 5
HEADS = (
    "T, H, I, E, K",
    "weights",
    "parameters MiB",
    "FP8 forward MiB",
    "FP8 backward MiB",
    "peak event MiB",
    "peak step MiB",
    "event us",
    "step us",
)


@dataclass(frozen=True)
class Way:
    """How the weights of a step are held.

    frees: on copies, without the parameters' memory. iso: one buffer for both directions. releases:
    forward's buffers go after the last forward.
    """

    name: str
    frees: bool
    iso: bool
    releases: bool = False


WAYS = (
    Way("kept", frees=False, iso=False),
    Way("kept, iso_weight", frees=False, iso=True),
    Way("freed", frees=True, iso=False),
    Way("freed, released", frees=True, iso=False, releases=True),
    Way("freed, iso_weight", frees=True, iso=True),
)


@dataclass
class Figures:
    """One way at one shape, of all layers together. Memory in MiB, times in microseconds; peaks are
    None where there is no GPU.

    parameters, forward, backward: held while forwards run, FP8 while forwards and backwards do.
    peak_event, peak_step: the allocator's, with everything. event, step: median host time between
    two waits for the device.
    """

    parameters: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    peak_event: float | None = None
    peak_step: float | None = None
    event: float = 0.0
    step: float = 0.0
    gradients: list[Tensor] = field(default_factory=list, repr=False)


class Layers:
    """L layers of native BF16 parameters with `main_grad`, and a node on each.

    On the host lie the values, as an optimizer's masters would.
    """

    def __init__(self, shape: Shape, count: int, variant: Variant, iso: bool, device: str) -> None:
        """The same values for the same shape."""
        config = replace(variant.config, iso_weight=iso)
        generator = torch.Generator().manual_seed(0)
        self.weights: list[Tensor] = []
        self.nodes: list[SonicMoEMlpNode] = []
        self._values: list[Tensor] = []
        experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        for _ in range(count):
            pair = []
            for size, fan in (
                ((experts, 2 * inner, hidden), hidden),
                ((experts, hidden, inner), inner),
            ):
                value = (torch.randn(size, generator=generator) * fan**-0.5).to(torch.bfloat16)
                weight = torch.nn.Parameter(value.to(device, copy=True))
                weight.main_grad = torch.zeros(size, device=device)  # type: ignore[attr-defined]
                self._values.append(value)
                pair.append(weight)
            self.weights += pair
            self.nodes.append(SonicMoEMlpNode.from_native(*pair, config=config, flush="auto"))

    def free(self) -> None:
        """As Paddle's `optimizer.clear_param_storage`."""
        for weight in self.weights:
            weight.untyped_storage().resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """As an optimizer that writes its masters."""
        for weight, value in zip(self.weights, self._values, strict=True):
            weight.untyped_storage().resize_(value.numel() * value.element_size())
            weight.data.copy_(value)
        for weight in self.weights:
            weight.main_grad.zero_()  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        """Of the parameters' memory."""
        return sum(weight.untyped_storage().nbytes() for weight in self.weights)


class Step:
    """One optimizer step, part by part."""

    def __init__(self, layers: Layers, way: Way, batch: Batch, micro_batches: int) -> None:
        """Nothing runs yet."""
        self._layers, self._way, self._batch, self._count = layers, way, batch, micro_batches
        self._copies: list[WeightCopies | None] = [None] * len(layers.nodes)
        self._outs: list[Tensor] = []

    def event(self) -> None:
        """All layers quantise."""
        if self._way.frees:
            self._copies = [node.make_copies() for node in self._layers.nodes]
            return
        for node in self._layers.nodes:
            node.step()
            node.prequantize_weights()

    def forwards(self) -> None:
        """Of every micro-batch, through all layers."""
        for number in range(self._count):
            x = self._batch.x.detach().requires_grad_()
            last = number == self._count - 1
            for node, copies in zip(self._layers.nodes, self._copies, strict=True):
                x = node(
                    x, self._batch.counts, self._batch.indices, self._batch.probs, copies=copies
                )
                if last and self._way.releases and copies is not None:
                    kept = copies.release_forward()
                    if kept:
                        raise RuntimeError(f"forward's copies were not released: {kept}")
            self._outs.append(x)

    def backwards(self) -> None:
        """In the order of the forwards."""
        for out in self._outs:
            out.backward(self._batch.dout)
        self._outs = []

    def run(self) -> None:
        """What comes between the event and the optimizer."""
        self.forwards()
        self.backwards()

    def drop(self) -> None:
        """The copies, as before an optimizer."""
        self._copies = []

    @property
    def fp8_bytes(self) -> int:
        """Of the quantised weights that somebody holds."""
        if self._way.frees:
            return sum(copies.nbytes for copies in self._copies if copies is not None)
        # What the nodes hold is what copies of the same settings would.
        return sum(node.make_copies().nbytes for node in self._layers.nodes)


def wait(device: str) -> None:
    """For the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed(run: Any, device: str) -> float:
    """Microseconds."""
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return 1e6 * (time.perf_counter() - began)


def peak_of(run: Any, device: str) -> float | None:
    """The allocator's peak during a call, in MiB."""
    if device == "cpu":
        run()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB


def measure_way(
    shape: Shape, way: Way, variant: Variant, device: str, count: int, micro_batches: int
) -> Figures:
    """Memory in the second step, in which everything that is kept is there; then times."""
    layers, figures = Layers(shape, count, variant, way.iso, device), Figures()
    torch.manual_seed(0)  # every way computes the same
    batch = Batch.random(shape, device)
    events, steps = [], []
    for number in range(STEPS):
        step = Step(layers, way, batch, micro_batches)
        if number == 1:
            figures.peak_event = peak_of(step.event, device)
        else:
            events.append(timed(step.event, device))
        if way.frees:
            layers.free()
        if number == 1:
            figures.parameters = layers.nbytes / MIB
            figures.forward = step.fp8_bytes / MIB
            free_cached()
            figures.peak_step = peak_of(step.run, device)
            figures.backward = step.fp8_bytes / MIB
            figures.gradients = [w.main_grad.to("cpu", copy=True) for w in layers.weights]  # type: ignore[attr-defined]
        else:
            steps.append(timed(step.run, device))
        step.drop()
        layers.restore()
    figures.event, figures.step = statistics.median(events), statistics.median(steps)
    return figures


def free_cached() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    shape: Shape, variant: Variant, device: str, count: int, micro_batches: int
) -> dict[str, Figures]:
    """Figures of every way, one after the other.

    Raises:
        RuntimeError: the gradients of two ways differ in a bit.
    """
    every: dict[str, Figures] = {}
    for way in WAYS:
        every[way.name] = measure_way(shape, way, variant, device, count, micro_batches)
        free_cached()
        first, found = every[WAYS[0].name].gradients, every[way.name].gradients
        if not all(map(torch.equal, first, found)):
            raise RuntimeError(f"gradients of {way.name!r} and {WAYS[0].name!r} differ")
        if not any(bool(gradient.any()) for gradient in found):
            raise RuntimeError("no gradient arrived in main_grad")
    return every


def rows_of(name: str, every: dict[str, Figures]) -> list[list[str]]:
    """A row for each way."""
    return [
        [
            name,
            way,
            *(f"{value:,.1f}" for value in (each.parameters, each.forward, each.backward)),
            *("–" if p is None else f"{p:,.0f}" for p in (each.peak_event, each.peak_step)),
            *(f"{value:,.0f}" for value in (each.event, each.step)),
        ]
        for way, each in every.items()
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


@click.command()
@click.option("--check", is_flag=True, help="Tiny sizes, reference engine, no GPU.")
@click.option("--layers", default=4, show_default=True, help="Layers of the stack.")
@click.option("--micro-batches", default=2, show_default=True, help="Of a step.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
def main(check: bool, layers: int, micro_batches: int, json_path: Path | None) -> None:
    """Print a table: what is held and what is needed at most."""
    device = "cpu" if check else "cuda:0"
    variant = Variant(EngineName.REFERENCE if check else EngineName.HOPPER, "perf")
    facts: dict[str, Any] = machine()
    rows, report = [], []
    for shape in TINY if check else SHAPES:
        every = measure(shape, variant, device, layers, micro_batches)
        rows += rows_of(", ".join(map(str, vars(shape).values())), every)
        figures = {name: asdict(replace(each, gradients=[])) for name, each in every.items()}
        report.append({"shape": vars(shape), "layers": layers, "ways": figures})
    click.echo(
        f"{variant} on {facts['device']}, {facts['date']}, torch {torch.__version__}; "
        f"{layers} layers, {micro_batches} micro-batches\n"
    )
    click.echo(table(HEADS, rows))
    if json_path:
        json_path.write_text(
            json.dumps({"machine": facts, "figures": report}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
