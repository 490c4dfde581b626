#!/usr/bin/env python3
"""Time what is around the weight-gradient GEMMs, operands before and flush behind, beside a copy of
as many bytes in the same run.

    python benchmarks/wgrad_operands_bench.py [--json FILE]

The variants of one shape are captured in CUDA graphs and replayed in turns, so that all see the
same clocks. Bytes are those a
perfect cache would move: each token once, each output once; a gradient, its destination and the
zeros once.
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
from gpu_timing import interleaved_us

from sonicmoe.gradients import destinations as gradients
from sonicmoe.interop import current_stream
from sonicmoe.kernels.cuda_wgrad import flush_source, wgrad_operands_source
from sonicmoe.quant.format import BlockScaledTensor, Orientation
from sonicmoe.quant.recipes import iso
from sonicmoe.routing.build import build_routing

Tensor = torch.Tensor
# (T, H, I, E, K)
SHAPES = (
    (8192, 3072, 1536, 8, 8),
    (2048, 3072, 1536, 8, 8),
    (8192, 3072, 1536, 32, 8),
    (16384, 2048, 768, 128, 8),
)
CALLS = 4  # in one graph
Variants = dict[str, tuple[Callable[[], object], float]]


def operand_variants(
    tokens: int, hidden: int, intermediate: int, experts: int, topk: int
) -> Variants:
    """`name -> (launch, bytes)`, bf16 tokens and balanced random routing."""
    indices = (
        torch.rand((tokens, max(experts, topk)), device="cuda").topk(topk, 1).indices % experts
    )
    counts = torch.bincount(indices.reshape(-1), minlength=experts).tolist()
    routing = build_routing(indices, torch.rand((tokens, topk), device="cuda"), experts, counts)
    rows = routing.num_rows
    x, dout = (torch.randn((tokens, hidden), device="cuda").to(torch.bfloat16) for _ in range(2))
    one = hidden * (2.0 * tokens + rows)
    kernels = wgrad_operands_source("sm_90a").load()
    outs = [
        BlockScaledTensor.empty((hidden, rows), iso(128), "cuda", orientation=Orientation.COLUMNS)
        for _ in range(2)
    ]
    first, both = ([t for out in outs[:n] for t in (out.bytes, out.scale_inv)] for n in (1, 2))
    routed = routing.row_token, routing.padded_offsets

    def gather() -> None:
        kernels.gather_transpose_quantize(x, *routed, *first, current_stream(x))

    def gather_pair() -> None:
        kernels.gather_transpose_quantize_pair(x, dout, *routed, *both, current_stream(x))

    return {
        "x^T": (gather, one),
        "x^T and dout^T, one launch": (gather_pair, 2 * one),
        "copy of as much as x^T": copy_of(one),
    }


def flush_variants(hidden: int, intermediate: int, experts: int) -> Variants:
    """Added to fp32 main_grad, and written to a fresh bf16 gradient, per expert in the layout of
    ERNIE's weights.
    """
    n1 = 2 * intermediate
    kernel = flush_source("sm_90a").load()
    dw1 = torch.zeros((experts, n1, hidden), device="cuda")
    dw2 = torch.zeros((experts, hidden, intermediate), device="cuda")
    elements = float(dw1.numel() + dw2.numel())

    def launch(dtype: torch.dtype, fresh: bool) -> Callable[[], object]:
        shapes = [(hidden, n1)] * experts + [(intermediate, hidden)] * experts
        targets = [torch.zeros(shape, device="cuda", dtype=dtype) for shape in shapes]
        table = gradients.destination_table(
            [gradients.Destination(t, t, fresh) for t in targets], experts, kernel
        )
        # `targets` as a default keeps the memory that the table points to.
        return lambda targets=targets: kernel.flush_gradients(
            dw1, dw2, table, True, True, current_stream(dw1)
        )

    return {
        "flush, added to fp32 main_grad": (launch(torch.float32, False), 16 * elements),
        "flush, written to bf16 grad": (launch(torch.bfloat16, True), 10 * elements),
        "copy of as much as the former": copy_of(16 * elements),
    }


def copy_of(size: float) -> tuple[Callable[[], object], float]:
    """A device copy that reads and writes `size` bytes in all."""
    source = torch.zeros(int(size) // 32, dtype=torch.int64, device="cuda").repeat(2)
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)), size


def measured(shape: tuple[int, ...], variants: Variants, rounds: int) -> list[dict[str, Any]]:
    """One result and one printed line per variant."""
    results = []
    calls = {name: lambda _, launch=launch: launch() for name, (launch, _) in variants.items()}
    times = {name: median for name, (median, _) in interleaved_us(calls, CALLS, rounds).items()}
    copy = next(variants[name][1] / us for name, us in times.items() if name.startswith("copy"))
    for name, us in times.items():
        rate = variants[name][1] / us
        results.append(
            {"shape": shape, "name": name, "us": us, "GB/s": rate / 1e3, "of_copy": rate / copy}
        )
        click.echo(
            f"{shape!s:30} {name:32} {us:8.1f} us {rate / 1e3:7.0f} GB/s {rate / copy:5.0%} of copy"
        )
    return results


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option("--rounds", default=20, show_default=True, help="Timed replays of each variant.")
def main(json_path: Path | None, rounds: int) -> None:
    """Print microseconds and bandwidth of each kernel at every shape."""
    report = []
    for shape in SHAPES:
        report += measured(shape, operand_variants(*shape), rounds)
        torch.cuda.empty_cache()
        report += measured(shape, flush_variants(*shape[1:4]), rounds)
        torch.cuda.empty_cache()
    if json_path:
        json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
