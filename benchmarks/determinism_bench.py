#!/usr/bin/env python3
"""The price of equal bits: the engine's sums in a fixed order beside the same sums by atomics, at
the reference shape.

    python benchmarks/determinism_bench.py [--shape T,H,I,E,K] [--json]

Two sums of a step have an order to fix. Per token, the rows of its experts (out and dx): each token
gathers its rows in slot order; atomics scatter every row into a zeroed fp32 result instead, which
is then rounded to bf16. Per slot, the tiles' parts of its dprob: parts are summed and moved to the
slots; atomics add every part into zeroed slots (that parts are written at all, or added where they
arise, is not timed). Weight gradients have no such choice: one thread block owns a tile of them.
The variants of one sum are captured in CUDA graphs and replayed in turns; the price is the time of
the fixed order over that of the fastest atomics, less one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import triton
import triton.language as tl
from gpu_timing import interleaved_us

from sonicmoe.interop import current_stream
from sonicmoe.kernels import routing_metadata_source
from sonicmoe.kernels.host import passes_source
from sonicmoe.routing.backends import arch_of
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.combine import aggregate
from sonicmoe.routing.metadata import RoutingMetadata

Tensor = torch.Tensor
Variants = dict[str, Callable[[], Tensor]]
DEVICE = "cuda"
OURS, NO_SUMS = "fixed order", "zeroing alone"
CALLS, REPEATS = 4, 5  # in one graph; to compare bits
BLOCK = 1024
AGREEMENT = 2e-3  # relative RMSE between orders of addition, after one rounding to bf16


@triton.jit
def _scatter_add(
    rows, row_token, row_prob, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """`out[row_token[r]] += rows[r]`, times `row_prob[r]` if WEIGHTED; rows of no token are
    skipped.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(row_token + row).to(tl.int64)
    if token >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(rows + row * width + column, mask=inside).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(row_prob + row)
        tl.atomic_add(out + token * width + column, values, mask=inside, sem="relaxed")


class Sums:
    """One step's rows and parts on random data and random routing, and every way to sum them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Allocate and fill everything at `(T, H, I, E, K)`."""
        self.tokens, self.hidden, intermediate, experts, self.topk = shape
        self.routing = route(self.tokens, experts, self.topk)
        rows, padding = self.routing.num_rows, self.routing.row_token < 0
        spread = torch.arange(
            rows, device=DEVICE
        )  # padding rows are zeros: wherever they go, on no one token together
        self.rows = torch.randn((rows, self.hidden), device=DEVICE).to(torch.bfloat16)
        self.rows[padding] = 0
        columns = int(passes_source(arch_of(DEVICE)).load().numbers()["dprob_columns"])
        self.parts = torch.randn((-(-intermediate // columns), rows), device=DEVICE)
        self.parts[:, padding] = 0
        self.token = torch.where(
            padding, spread % self.tokens, self.routing.row_token.to(torch.int64)
        )
        slot = torch.where(padding, spread % (self.tokens * self.topk), self.routing.row_slot)
        self.slot = slot.repeat(len(self.parts))

    def of_rows(self, weighted: bool) -> Variants:
        """bf16 `[T, H]`: out where weighted, else dx."""
        width = (self.tokens, self.hidden)

        def zeros() -> Tensor:
            return torch.zeros(width, device=DEVICE)

        def atomics() -> Tensor:
            total, routing = zeros(), self.routing
            grid = (routing.num_rows, triton.cdiv(self.hidden, BLOCK))
            _scatter_add[grid](
                self.rows, routing.row_token, routing.row_prob, total, self.hidden, weighted, BLOCK
            )
            return total.to(torch.bfloat16)

        def index_add() -> Tensor:
            rows = self.rows.to(torch.float32)
            rows = rows * self.routing.row_prob.unsqueeze(1) if weighted else rows
            return zeros().index_add_(0, self.token, rows).to(torch.bfloat16)

        return {
            OURS: lambda: aggregate(self.rows, self.routing, weighted=weighted),
            "atomics, one kernel": atomics,
            "index_add_": index_add,
            NO_SUMS: lambda: zeros().to(torch.bfloat16),
        }

    def of_parts(self) -> Variants:
        """fp32 `[T, K]`: dprobs."""
        shape = (self.tokens, self.topk)

        def zeros() -> Tensor:
            return torch.zeros(self.tokens * self.topk, device=DEVICE)

        sum_or_zero = routing_metadata_source(arch_of(DEVICE)).load().sum_or_zero

        def ours() -> Tensor:
            out = torch.empty(shape, device=DEVICE)
            sum_or_zero(self.routing.slot_row, self.parts, out, current_stream(out))
            return out

        return {
            OURS: ours,
            "index_add_": lambda: (
                zeros().index_add_(0, self.slot, self.parts.reshape(-1)).reshape(shape)
            ),
            NO_SUMS: lambda: zeros().reshape(shape),
        }


def route(tokens: int, experts: int, topk: int) -> RoutingMetadata:
    """Every slot routed to a random local expert."""
    ids = torch.rand((tokens, experts), device=DEVICE).topk(topk, 1).indices
    counts = torch.bincount(ids.reshape(-1), minlength=experts).tolist()
    return build_routing(ids, torch.rand((tokens, topk), device=DEVICE) + 0.05, experts, counts)


def repeats(call: Callable[[], Tensor]) -> bool:
    """Whether every run gives the bits of the first."""
    first = call()
    return all(torch.equal(call(), first) for _ in range(REPEATS))


def check_agreement(name: str, variants: Variants) -> None:
    """Raise where a variant sums something else."""
    wanted = variants[OURS]().double()
    for variant, call in variants.items():
        error = float((call().double() - wanted).norm() / wanted.norm())
        if variant != NO_SUMS and not error <= AGREEMENT:
            raise RuntimeError(
                f"{name}: {variant!r} differs from {OURS!r} by {error:.2e} of its norm"
            )


def measure(name: str, variants: Variants, rounds: int) -> dict[str, Any]:
    """Microseconds, repeatability, and the price of the fixed order in percent of the fastest
    atomics.
    """
    check_agreement(name, variants)
    timed = {variant: (lambda _, call=call: call()) for variant, call in variants.items()}
    times = {
        variant: median for variant, (median, _) in interleaved_us(timed, CALLS, rounds).items()
    }
    fastest = min(time for variant, time in times.items() if variant not in (OURS, NO_SUMS))
    return {
        "sum": name,
        "us": {variant: round(time, 2) for variant, time in times.items()},
        "equal_bits": {
            variant: repeats(call) for variant, call in variants.items() if variant != NO_SUMS
        },
        "price_percent": round(100 * (times[OURS] / fastest - 1), 1),
        "price_us": round(times[OURS] - fastest, 2),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """One aligned line per variant, then the price."""
    said = {
        True: "equal bits",
        False: "bits differ between runs",
        None: "the least that atomics cost",
    }
    table = [
        f"{result['sum']:8} {variant:20} {time:9.1f} us  {said[result['equal_bits'].get(variant)]}"
        for variant, time in result["us"].items()
    ]
    return [
        *table,
        f"{result['sum']:8} price of equal bits  {result['price_us']:9.1f} us  {result['price_percent']:+.1f} %",
    ]


@click.command()
@click.option("--shape", default="8192,3072,1536,8,8", show_default=True, help="T,H,I,E,K")
@click.option("--rounds", default=30, show_default=True, help="Timed replays of each variant.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def main(shape: str, rounds: int, as_json: bool) -> None:
    """Print what a fixed order of additions costs, per sum and altogether."""
    sizes = tuple(int(size) for size in shape.split(","))
    sums = Sums(sizes)
    tables = {"out": sums.of_rows(True), "dx": sums.of_rows(False), "dprobs": sums.of_parts()}
    results = [measure(name, variants, rounds) for name, variants in tables.items()]
    total = round(sum(result["price_us"] for result in results), 2)
    if as_json:
        click.echo(json.dumps({"shape": sizes, "sums": results, "price_us": total}))
        return
    for result in results:
        click.echo("\n".join(lines(result)))
    click.echo(f"price of equal bits in a step, T,H,I,E,K = {shape}: {total:+.1f} us")


if __name__ == "__main__":
    main()
