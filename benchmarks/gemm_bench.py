#!/usr/bin/env python3
"""Time the FP8 grouped GEMMs on the GPU, beside cuBLAS' tensor-wise FP8 product of 8192 x 8192 x
8192 in the same run.

A figure is the median over launches of one launch's GPU time, from CUDA events, after an idle
pause; variants are timed in turns.
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

from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.interop import current_stream
from sonicmoe.kernels.sm90 import fp8_grouped_gemm_source
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.build import build_routing

SHAPES = (
    (8192, 3072, 1536, 8, 8),
    (2048, 3072, 1536, 8, 8),
    (8192, 3072, 1536, 32, 8),
    (16384, 2048, 768, 128, 8),
)
E4M3 = torch.float8_e4m3fn
RECIPE = RECIPES[HOPPER.recipes[0]]


def variants(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[], object], float]]:
    """`name -> (launch, floating-point operations)` at `(T, H, I, E, K)`, on random data and
    balanced random routing.
    """
    tokens, hidden, intermediate, experts, topk = shape
    module = fp8_grouped_gemm_source("sm_90a").load()
    indices = torch.rand((tokens, experts), device="cuda").topk(topk, 1).indices
    counts = torch.bincount(indices.reshape(-1), minlength=experts).tolist()
    routing = build_routing(indices, torch.rand((tokens, topk), device="cuda"), experts, counts)
    r, n = routing.num_rows, 2 * intermediate
    x = quantize(torch.randn((tokens, hidden), device="cuda"), rows(128))
    w1 = quantize(torch.randn((experts, n, hidden), device="cuda") * hidden**-0.5, RECIPE.w1)
    w1_dgrad = quantize(
        torch.randn((experts, hidden, n), device="cuda") * hidden**-0.5, RECIPE.w1_dgrad.transposed
    )
    w2 = quantize(
        torch.randn((experts, hidden, intermediate), device="cuda") * intermediate**-0.5, RECIPE.w2
    )
    dz = quantize(torch.randn((r, n), device="cuda"), RECIPE.dz)
    y = quantize(torch.randn((r, intermediate), device="cuda"), rows(128))
    z, z_scale = (
        torch.empty((r, n), dtype=torch.int8, device="cuda"),
        torch.empty((r, n // 128), device="cuda"),
    )
    y1, y1_scale = (
        torch.empty((r, n // 2), dtype=E4M3, device="cuda"),
        torch.empty((r, -(-n // 256)), device="cuda"),
    )
    out = torch.empty((r, hidden), dtype=torch.bfloat16, device="cuda")
    stream = current_stream(out)

    def up(store_z: bool) -> object:
        return module.gather_gated_gemm(
            x.codes, x.scale_inv, w1.codes, w1.scale_inv, None, None, None, routing.row_token,
            routing.padded_offsets, z, z_scale, y1, y1_scale, 0, 0.0, 0.0, store_z, 0, stream,
        )  # fmt: skip

    def plain(a: object, w: object) -> object:
        return module.grouped_gemm(
            a.codes,
            a.scale_inv,
            w.codes,
            w.scale_inv,
            None,
            None,
            None,
            routing.padded_offsets,
            out,
            0,
            stream,
        )

    pairs = tokens * topk
    return {
        "up, gather, SwiGLU, y1 and z": (lambda: up(True), 4.0 * pairs * hidden * intermediate),
        "the same without z (inference)": (lambda: up(False), 4.0 * pairs * hidden * intermediate),
        "down": (lambda: plain(y, w2), 2.0 * pairs * hidden * intermediate),
        "dx": (lambda: plain(dz, w1_dgrad), 4.0 * pairs * hidden * intermediate),
    }


def cublas() -> tuple[Callable[[], object], float]:
    """The vendor's FP8 product, one scale per tensor."""
    a = torch.randn((8192, 8192), device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")
    return (lambda: torch._scaled_mm(a, a.T, one, one, out_dtype=torch.bfloat16)), 2.0 * 8192**3


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def main(as_json: bool) -> None:
    """Print microseconds and TFLOPS of every GEMM at every shape."""
    report = []
    for shape in SHAPES:
        table = {**variants(shape), "cuBLAS tensor-wise, 8192^3": cublas()}
        for name, (launch, operations) in table.items():
            time_us = statistics.median(median_us(launch) for _ in range(2))
            report.append(
                {"shape": shape, "gemm": name, "us": time_us, "tflops": operations / time_us / 1e6}
            )
            if not as_json:
                click.echo(
                    f"{shape!s:30} {name:32} {time_us:8.1f} us {report[-1]['tflops']:7.0f} TFLOPS"
                )
    if as_json:
        click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
