#!/usr/bin/env python3
"""Time the six products of engine `bf16` on Hopper, each alone, beside torch's bare grouped GEMM of
the same size, at the sizes of public models.

torch's products gather nothing, activate nothing and have no padding rows: their sum is what the
GEMMs of a step cost without an engine. The two take turns launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import click
import timing
import torch

from sonicmoe.engine.bf16_sm90 import HopperProducts, add_gradients, kernels_for
from sonicmoe.engine.bf16_weights import weights_in_place
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.interface import EngineSettings, EngineWeights
from sonicmoe.engine.targets import FreshTargets, ParameterTargets
from sonicmoe.engine.tokens import PendingWgrad
from sonicmoe.enums import ActivationType
from sonicmoe.interop import current_stream
from sonicmoe.layouts import WeightLayout
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.metadata import RoutingMetadata
from sonicmoe.weight_source import WeightSource

Tensor = torch.Tensor
Launch = Callable[[], object]
PRODUCTS = ("up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up")


class Model(NamedTuple):
    """The experts of one layer, and how its weights lie."""

    hidden: int
    inner: int
    experts: int
    topk: int
    layout: WeightLayout
    activation: ActivationType = ActivationType.SWIGLU


HALVES = WeightLayout(split_half=True)
MODELS = {
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8, HALVES),
    "Qwen3-Next-80B-A3B": Model(2048, 512, 512, 10, HALVES),
    "Moonlight-16B-A3B": Model(2048, 1408, 64, 6, HALVES),
    "gpt-oss-20b": Model(
        2880, 2880, 32, 4, WeightLayout(transposed=True), ActivationType.SWIGLU_OAI
    ),
    "gpt-oss-120b": Model(
        2880, 2880, 128, 4, WeightLayout(transposed=True), ActivationType.SWIGLU_OAI
    ),
}


class Layer:
    """Operands of one layer on random data and random routing, weights and gradients in bf16."""

    def __init__(self, model: Model, tokens: int) -> None:
        """Allocate and fill everything."""
        order = -1 if model.layout.transposed else 1
        shapes = (2 * model.inner, model.hidden), (model.hidden, model.inner)
        w1, w2 = (_random(model.experts, *shape[::order]) for shape in shapes)
        self.settings = EngineSettings(model.activation)
        source = WeightSource.stacked(w1, w2, layout=model.layout)
        self.weights = weights_in_place(source, model.activation)
        self.x, self.dout = (_random(tokens, model.hidden) for _ in range(2))
        indices = torch.rand((tokens, model.experts), device="cuda").topk(model.topk, 1).indices
        counts = torch.bincount(indices.reshape(-1), minlength=model.experts)
        probs = torch.rand((tokens, model.topk), device="cuda")
        self.routing = build_routing(indices, probs, model.experts, counts.tolist())
        self.counts = counts

    def ours(self) -> dict[str, Launch]:
        """A launch of each product of the engine; gradients are written."""
        gradients = tuple(torch.empty_like(w) for w in (self.weights.w1, self.weights.w2))
        up, down = (
            WeightTarget.stacked(g, self.weights.num_experts, self.weights.layout)
            for g in gradients
        )
        return launches(
            self.x, self.dout, self.weights, self.routing, self.settings, FreshTargets(up, down)
        )

    def bare(self) -> dict[str, Launch]:
        """torch's grouped GEMMs, over rows that are gathered and packed already."""
        token = self.routing.row_token
        token = token[token >= 0].long()
        ends = self.counts.cumsum(0).int()
        inner, rows = self.weights.intermediate_size, int(token.numel())
        w1, w2 = self.weights.w1, self.weights.w2
        if self.weights.layout.transposed:  # as `[E, N1, H]` and `[E, H, I]`
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        x, dout, y1s = self.x[token], self.dout[token], _random(rows, inner)
        y1, dz, gemm = _random(rows, inner), _random(rows, 2 * inner), torch._grouped_mm
        return {
            "up": lambda: gemm(x, w1.transpose(1, 2), ends),
            "down": lambda: gemm(y1, w2.transpose(1, 2), ends),
            "dgated": lambda: gemm(dout, w2, ends),
            "dgrad": lambda: gemm(dz, w1, ends),
            "wgrad_down": lambda: gemm(dout.t(), y1s, ends),
            "wgrad_up": lambda: gemm(dz.t(), x, ends),
        }


def _random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def launches(
    x: Tensor,
    dout: Tensor,
    weights: EngineWeights,
    routing: RoutingMetadata,
    settings: EngineSettings,
    targets: ParameterTargets,
) -> dict[str, Launch]:
    """A launch of each product, on rows of its own; gradients are added to `targets`, or written
    where these are fresh.
    """
    rows, n1, inner = routing.num_rows, weights.n1, weights.intermediate_size
    z, dz = _random(rows, n1), _random(rows, n1)
    y1, y1s = _random(rows, inner), _random(rows, inner)
    y2, dx = _random(rows, weights.hidden_size), _random(rows, weights.hidden_size)
    kernels, stream = kernels_for(x, settings, weights), current_stream(x)
    products = HopperProducts(routing, weights, kernels, settings, None, stream)
    nothing = WeightTarget.stacked(None, weights.num_experts, weights.layout)

    def wgrad(up: WeightTarget, down: WeightTarget) -> Launch:
        halves = weights.layout.split_half
        pending = PendingWgrad(settings, routing, x, dout, dz, y1s, halves)
        wanted = type(targets)(up, down)
        return lambda: add_gradients(pending, wanted, None)

    return {
        "up": lambda: products.up(x, z, y1),
        "down": lambda: products.down(y1, y2),
        "dgated": lambda: products.dgated(dout, z, dz, y1s),
        "dgrad": lambda: products.dgrad(dz, dx),
        "wgrad_down": wgrad(nothing, targets.down),
        "wgrad_up": wgrad(targets.up, nothing),
    }


def measure(model: Model, tokens: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each product: ours, torch's."""
    layer, found = Layer(model, tokens), {}
    ours, bare = layer.ours(), layer.bare()
    for name in PRODUCTS:
        us = timing.launches_us({"ours": ours[name], "bare": bare[name]}, rounds)
        found[name] = us["ours"], us["bare"]
    return found


def table(name: str, tokens: int, found: Mapping[str, tuple[float, float]]) -> str:
    """A line for each product, and their sums."""
    sums = tuple(sum(column) for column in zip(*found.values(), strict=True))
    rows = (
        (product, timing.cell(one), timing.cell(other), timing.cell(one / other, ".3f"))
        for product, (one, other) in {**found, "sum": sums}.items()
    )
    return timing.markdown((f"{name}, T={tokens}", "us, ours", "torch's", "over torch's"), rows)


@click.command()
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), default=MODELS)
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True)
@timing.rounds_option(20)
@timing.json_option
def main(names: tuple[str, ...], tokens: int, rounds: int, json_file: Path | None) -> None:
    """Time the products of these models' layers."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise click.ClickException("needs a Hopper GPU")
    report = {}
    for name in names:
        report[name] = measure(MODELS[name], tokens, rounds)
        click.echo(table(name, tokens, report[name]))
        torch.cuda.empty_cache()
    timing.write_figures(json_file, models=report)


if __name__ == "__main__":
    main()
