#!/usr/bin/env python3
"""Wall time of the node at batches so small that the host is the bound, in a stack of layers with one
backward.

    benchmarks/small_batch_bench.py                # one Hopper GPU
    benchmarks/small_batch_bench.py --tokens 256 --experts 8 --step   # node.step() behind every call

| column | what |
|---|---|
| wall | microseconds of a layer, forward and backward, by the host's clock over rows of eight steps |
| host | until the host had launched one of five steps |
| GPU | in which the GPU worked, from the profiler |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import timing
import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

LAYERS, HIDDEN, INNER, TOPK = 8, 3072, 1536, 8
FINE = 2048, 768  # H and I from 128 experts on
ROUNDS, BURSTS = 7, 3


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


def stack(tokens: int, experts: int, ends: bool) -> timing.Way:
    """Forward through all layers, and one backward; ends: whether every node's own step follows."""
    hidden, inner = FINE if experts >= 128 else (HIDDEN, INNER)
    nodes = nodes_of(experts, hidden, inner)
    first = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16).requires_grad_()
    ids = torch.rand(tokens, experts, device="cuda").topk(TOPK, 1).indices
    probs = torch.rand(ids.shape, device="cuda").requires_grad_()
    dout = torch.randn_like(first)

    def clear() -> None:
        first.grad = probs.grad = None

    def step() -> None:
        x = first
        for node in nodes:
            x = node(x, None, ids, probs)
        clear()
        x.backward(dout)
        for node in nodes if ends else ():
            node.step()

    return timing.Way(step, step, clear)


@click.command(help=__doc__)
@click.option("--tokens", multiple=True, type=int, default=[256, 512, 1024, 2048])
@click.option("--experts", multiple=True, type=int, default=[8, 128])
@click.option("--step", "ends", is_flag=True, help="End every call with node.step().")
@timing.json_option
def main(
    tokens: tuple[int, ...], experts: tuple[int, ...], ends: bool, json_file: Path | None
) -> None:
    """Measure and print."""
    device = timing.device_of(quick=False)
    figures: dict[str, Any] = {}
    for count in experts:
        for size in tokens:
            ways = {"": stack(size, count, ends)}
            (found,) = timing.measured(ways, device, ROUNDS, BURSTS).values()
            names = {"wall": "wall", "host": "host", "gpu": "busy"}
            figures[f"{size}, {count}"] = {key: found[of] / LAYERS for key, of in names.items()}
    rows = ((name, *map(timing.cell, row.values())) for name, row in figures.items())
    click.echo(timing.markdown(("T, E", "wall", "host", "GPU"), rows))
    timing.write_figures(json_file, **figures)


if __name__ == "__main__":
    main()
