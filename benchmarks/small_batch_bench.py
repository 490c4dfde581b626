#!/usr/bin/env python3
"""Wall time of the node at batches so small that the host is the bound, in a stack of layers with one
backward.

    benchmarks/small_batch_bench.py                # one Hopper GPU
    benchmarks/small_batch_bench.py --tokens 256 --experts 8 --step   # node.step() behind every call

| column | what |
|---|---|
| wall | microseconds of a layer, forward and backward, by the host's clock over rows of steps |
| host | until the host had launched them |
| GPU | time by the device's clock, launched ahead: what the GPU needs |
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import timing
import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

LAYERS, HIDDEN, INNER, TOPK = 8, 3072, 1536, 8
FINE = 2048, 768  # H and I from 128 experts on
STEPS, ROUNDS = 10, 7


class Row(NamedTuple):
    """Microseconds of one layer."""

    wall: float
    host: float
    gpu: float


def nodes_of(experts: int, hidden: int, inner: int) -> list[SonicMoEMlpNode]:
    """One per layer, with weights of its own."""
    made = []
    for _ in range(LAYERS):
        weights = []
        for shape in ((experts, hidden, 2 * inner), (experts, inner, hidden)):
            values = torch.randn(shape, device="cuda") * shape[1] ** -0.5
            weights.append(torch.nn.Parameter(values.to(torch.bfloat16)))
            weights[-1].main_grad = torch.zeros(shape, device="cuda")  # type: ignore[attr-defined]
        config = SonicMoEConfig(engine="hopper", fp8_mode="perf")
        made.append(SonicMoEMlpNode.from_fused(*weights, config=config))
    return made


class Stack:
    """Layers in a row, and a batch. ends: whether every call ends with the node's own step."""

    def __init__(
        self, nodes: list[SonicMoEMlpNode], x: torch.Tensor, ids: torch.Tensor, ends: bool
    ) -> None:
        self._nodes, self._x, self._ids, self._ends = nodes, x.requires_grad_(), ids, ends
        self._probs = torch.rand(ids.shape, device="cuda").requires_grad_()
        self._dout = torch.randn_like(x)

    def step(self) -> None:
        """Forward through all, and one backward."""
        x = self._x
        for node in self._nodes:
            x = node(x, None, self._ids, self._probs)
        self._x.grad = self._probs.grad = None
        x.backward(self._dout)
        for node in self._nodes if self._ends else ():
            node.step()

    def timed(self) -> tuple[float, float, float]:
        """Wall, host and GPU microseconds of a layer, over a row of steps."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)  # the host launches behind it
        start.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        count = STEPS * LAYERS
        return 1e6 * wall / count, 1e6 * host / count, 1e3 * start.elapsed_time(end) / LAYERS


def measure(tokens: int, experts: int, ends: bool) -> Row:
    """Medians of the rounds of one shape."""
    hidden, inner = FINE if experts >= 128 else (HIDDEN, INNER)
    x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(TOPK, 1).indices
    stack = Stack(nodes_of(experts, hidden, inner), x, ids, ends)
    rounds = [stack.timed() for _ in range(ROUNDS + timing.WARM_UPS)][timing.WARM_UPS :]
    return Row(*map(statistics.median, zip(*rounds, strict=True)))


@click.command(help=__doc__)
@click.option("--tokens", multiple=True, type=int, default=[256, 512, 1024, 2048])
@click.option("--experts", multiple=True, type=int, default=[8, 128])
@click.option("--step", "ends", is_flag=True, help="End every call with node.step().")
@timing.json_option
def main(
    tokens: tuple[int, ...], experts: tuple[int, ...], ends: bool, json_file: Path | None
) -> None:
    """Measure and print."""
    timing.device_of(quick=False)
    figures: dict[str, Any] = {}
    for count in experts:
        for size in tokens:
            row = measure(size, count, ends)
            figures[f"{size}, {count}"] = row._asdict()
    rows = ((name, *map(timing.cell, row.values())) for name, row in figures.items())
    click.echo(timing.markdown(("T, E", "wall", "host", "GPU"), rows))
    timing.write_figures(json_file, **figures)


if __name__ == "__main__":
    main()
