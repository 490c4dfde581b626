#!/usr/bin/env python3
"""Time the experts as expert parallelism calls them: of all routing slots, only a part is this
rank's, the others are sentinels.

Forward and backward at the reference shape through the functional API
(`moe_general_routing_inputs`) and through the experts implementation that transformers calls, at
100, 50 and 12.5 % valid slots. Time should fall with the valid part. A figure is the median over
calls of one call's GPU time, from CUDA events, after an idle pause; fractions are timed in turns.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_timing import median_us

from sonicmoe import SonicMoEConfig, moe_general_routing_inputs
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.functional.plan import make_plan
from sonicmoe.layouts import WeightLayout

FRACTIONS = (1.0, 0.5, 0.125)
Tensor = torch.Tensor


def sentinels(tokens: int, topk: int, experts: int, valid: float) -> Tensor:
    """int64 `[T, K]`: distinct ids, with exactly that part of all slots valid; -1 and E take turns
    in the others.
    """
    ids = torch.rand((tokens, experts), device="cuda").topk(topk, 1).indices
    order = torch.randperm(tokens * topk, device="cuda").reshape(tokens, topk)
    return torch.where(order < valid * tokens * topk, ids, torch.where(order % 2 == 0, -1, experts))


def calls(shape: tuple[int, ...], valid: float, use_fp8: bool) -> dict[str, Callable[[], object]]:
    """`name -> one forward and backward` at `(T, H, I, E, K)`."""
    tokens, hidden, intermediate, experts, topk = shape

    def leaf(*sizes: int) -> Tensor:
        return (
            (torch.randn(sizes, device="cuda") * sizes[-1] ** -0.5)
            .to(torch.bfloat16)
            .requires_grad_()
        )

    x, w1, w2 = (
        leaf(tokens, hidden),
        leaf(experts, 2 * intermediate, hidden),
        leaf(experts, hidden, intermediate),
    )
    ids = sentinels(tokens, topk, experts, valid)
    scores = torch.rand((tokens, topk), device="cuda", requires_grad=True)
    rows = torch.arange(tokens, device="cuda").repeat_interleave(topk)
    dout = torch.randn_like(x)
    config = SonicMoEConfig(fp8_mode="perf" if use_fp8 else "off")

    def general() -> object:
        with config.activate():
            out, _ = moe_general_routing_inputs(
                x, scores.reshape(-1), rows, ids.reshape(-1), w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None,
                experts, None, ActivationType.SWIGLU, concat_layout=True,
            )  # fmt: skip
        return torch.autograd.grad(out, [x, scores, w1, w2], dout)

    def implementation() -> object:
        out = expert_mlp(
            x, ids, scores, w1, w2, None, None, ActivationType.SWIGLU,
            layout=WeightLayout(split_half=True), use_fp8=use_fp8,
        )  # fmt: skip
        return torch.autograd.grad(out, [x, scores, w1, w2], dout)

    return {"functional API": general, "transformers": implementation}


@click.command()
@click.option("--shape", default="8192,3072,1536,8,8", help="T,H,I,E,K")
@click.option("--bf16", is_flag=True, help="BF16 instead of FP8.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def main(shape: str, bf16: bool, as_json: bool) -> None:
    """Print the time of every valid fraction, and its part of the time of all slots."""
    sizes = tuple(int(size) for size in shape.split(","))
    probe = torch.zeros((1, sizes[1]), device="cuda", dtype=torch.bfloat16)
    weights = (
        probe.new_zeros((1, 2 * sizes[2], sizes[1])),
        probe.new_zeros((1, sizes[1], sizes[2])),
        None,
        None,
    )
    plan = make_plan(ActivationType.SWIGLU, WeightLayout(), not bf16).fitted(probe, weights)
    engine = plan.choose().name
    by_fraction = {valid: calls(sizes, valid, not bf16) for valid in FRACTIONS}
    report = []
    for face in by_fraction[1.0]:
        turns = [
            {valid: median_us(by_fraction[valid][face]) for valid in FRACTIONS} for _ in range(3)
        ]
        times = {valid: statistics.median(turn[valid] for turn in turns) for valid in FRACTIONS}
        for valid, time_us in times.items():
            part = time_us / times[1.0]
            report.append({"face": face, "valid": valid, "us": time_us, "part": part})
            if not as_json:
                click.echo(
                    f"{engine} {face:16} {valid:6.1%} valid {time_us:9.1f} us {part:6.1%} of all slots"
                )
    if as_json:
        click.echo(json.dumps({"engine": engine, "shape": sizes, "fp8": not bf16, "rows": report}))


if __name__ == "__main__":
    main()
