#!/usr/bin/env python3
"""Time the Triton engine beside the BF16 engine on the GPU, in one process and in turns: every
kernel of a forward and backward, and the GPU's busy time.

`--sweep` times every product alone in every tiling of the list below, beside the BF16 engine's
product: from there come the tables of `kernels/triton/tilings.py`.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bf16_bench
import torch
from bf16_bench import BACKWARD, FORWARD, Step, compile_all, profiled_row
from bf16_products import launches
from gpu_timing import median_us

from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.targets import ParameterTargets
from sonicmoe.engine.triton import TritonEngine, index_of
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.triton.launches import Calls, native_place
from sonicmoe.kernels.triton.tilings import PRODUCTS, Tiling
from sonicmoe.kernels.triton.variants import ExpertShape, all_variants, variant
from sonicmoe.routing.backends import arch_of

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = (
    (8192, 3072, 1536, 8, 8),
    (2048, 3072, 1536, 8, 8),
    (8192, 3072, 1536, 32, 8),
    (16384, 2048, 768, 128, 8),
    (8192, 4096, 4096, 8, 8),
)
ROUNDS = 3
# The launches of a step of the Triton engine, in their order.
TRITON_FORWARD = ("index", "up", "down", "combine")
TRITON_BACKWARD = (
    "index",
    "dgated",
    "dprob sums",
    "dgrad",
    "combine dx",
    "dprobs",
    "index",
    "wgrad down",
    "wgrad up",
)
# Multiply-adds of a product, in units of rows times H times I.
WORK = {"up": 2, "down": 1, "dgated": 1, "dgrad": 2, "wgrad_down": 1, "wgrad_up": 2}


def candidates(product: str) -> Iterator[Tiling]:
    """What is worth a try on a GPU with WGMMA; those that spill show it in their time."""
    wgrad = product.startswith("wgrad")
    chunks = {"dgated": 8, "up": 2}.get(product, 2)
    deep = 6 if wgrad else 3
    wide = Tiling(128, 256, 64, 8, deep, chunks=chunks)
    square = Tiling(128, 128, 64, 8, deep, resident=2, chunks=max(1, chunks // 2))
    small = Tiling(128, 128, 64, 4, deep, resident=2, chunks=max(2, chunks // 2))
    yield from (wide, replace(wide, stages=deep + (2 if wgrad else 1)))
    yield from (replace(wide, group=4), replace(wide, group=16))
    yield replace(wide, k=32, stages=deep + 2)
    yield from (square, replace(square, stages=deep + 1), replace(square, group=16))
    yield from (small, replace(small, stages=deep + 1))
    yield from (replace(wide, m=64, warps=4), replace(square, m=64, warps=4, stages=deep + 1))
    yield replace(square, n=64, chunks=max(1, chunks // 4))
    if wgrad:
        yield from (replace(wide, m=256, n=128), replace(wide, stages=4))
    else:
        yield replace(wide, chunks=1 if product != "dgated" else 4)


def shape_of(hidden: int, intermediate: int) -> ExpertShape:
    """For the GPU that this runs on."""
    return ExpertShape(hidden, intermediate, ActivationType.SWIGLU, arch=arch_of("cuda:0"))


def jobs_of(hidden: int, intermediate: int) -> list[Any]:
    """Everything that a step of either engine launches."""
    ours = shape_of(hidden, intermediate)
    return [*bf16_bench.jobs_of(hidden, intermediate), *all_variants(ours)]


def compare(shape: Shape) -> list[dict[str, Any]]:
    """Both engines in turns: median microseconds of each launch, and their sums."""
    bf16 = Step(shape)
    triton = copy.copy(bf16)  # on the same operands
    triton.engine = TritonEngine()
    steps = {"bf16": bf16, "triton": triton}
    rows: dict[str, list[list[tuple[str, float]]]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step.both()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rows[name].append(profiled_row(step.both))
    report = []
    for name, profiles in rows.items():
        names = [launch for launch, _ in profiles[0]]
        times = [statistics.median(us for _, us in each) for each in zip(*profiles, strict=True)]
        labels = TRITON_FORWARD + TRITON_BACKWARD if name == "triton" else FORWARD + BACKWARD
        used = labels if len(labels) == len(names) else names
        report.append(
            {
                "shape": shape,
                "engine": name,
                "busy_us": sum(times),
                "kernels": list(zip(used, times, strict=True)),
            }
        )
    return report


def show(report: list[dict[str, Any]]) -> None:
    """One line per launch, both engines side by side, and the sums."""
    bf16, triton = report
    tokens, hidden, intermediate, _, topk = bf16["shape"]
    flops = 18.0 * tokens * topk * hidden * intermediate
    click.echo(f"T,H,I,E,K = {','.join(map(str, bf16['shape']))}")
    same = [name for name, _ in bf16["kernels"]] == [name for name, _ in triton["kernels"]]
    if same:
        for (name, one), (_, other) in zip(bf16["kernels"], triton["kernels"], strict=True):
            click.echo(
                f"    {name:12} bf16 {one:8.1f}  triton {other:8.1f} us  {one / other:5.2f}x"
            )
    else:
        for each in report:
            for name, us in each["kernels"]:
                click.echo(f"    {each['engine']:8} {name:40} {us:8.1f} us")
    one, other = bf16["busy_us"], triton["busy_us"]
    click.echo(
        f"    {'busy':12} bf16 {one:8.1f}  triton {other:8.1f} us  {one / other:5.2f}x"
        f"  {flops / one / 1e6:.0f} and {flops / other / 1e6:.0f} TFLOPS",
    )


def sweep(shape: Shape, products: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every product in every tiling, and by engine `bf16` on Hopper, fastest first."""
    step = Step(shape)
    mlp, rows = shape_of(shape[1], shape[2]), step.routing.num_rows
    pairs = [(product, tiling) for product in products for tiling in candidates(product)]
    extra: dict[str, dict[str, Any]] = {product: {} for product in PRODUCTS}
    extra["up"] = {"store_z": True, "store_y1": True}
    extra["wgrad_up"] = extra["wgrad_down"] = {"gradient": "float32", "step_m": 0}
    jobs = {
        pair: variant(pair[0], mlp, tiling=pair[1], **extra[pair[0]])
        for pair in dict.fromkeys(pairs)
    }
    failed = compile_all([*jobs.values(), *bf16_bench.jobs_of(shape[1], shape[2])])
    sms, bf16 = torch.cuda.get_device_properties(0).multi_processor_count, of_bf16(step)
    found = []
    for product in products:
        us = median_us(bf16[product], launches=15, rest=0.1)
        found.append({"product": product, "tiling": "bf16", "us": us})
    for pair, job in jobs.items():
        if str(job.key()) in failed:
            continue
        product, tiling = pair
        for lent in (0, sms):
            launch = _launch(step, Calls(mlp, lent, {product: tiling}), product)
            try:
                us = median_us(launch, launches=15, rest=0.1)
            except Exception as error:  # shared memory that does not fit, for one
                click.echo(f"{product} {tiling}: {error}", err=True)
                continue
            words = f"{tiling}{' persistent' if lent else ''}"
            found.append({"product": product, "tiling": words, "us": us})
    hidden, intermediate = mlp.hidden, mlp.intermediate
    for row in found:
        flops = 2.0 * WORK[row["product"]] * rows * hidden * intermediate
        row["tflops"] = flops / row["us"] / 1e6
    found.sort(key=lambda row: (products.index(row["product"]), row["us"]))
    return [{"shape": shape, **row} for row in found]


def of_bf16(step: Step) -> dict[str, Callable[[], object]]:
    """A launch of each product of engine `bf16` on Hopper."""
    weights, sums = step.weights, step.accumulators
    up, down = (
        WeightTarget.stacked(gradient, weights.num_experts, weights.layout)
        for gradient in (sums.dw1, sums.dw2)
    )
    targets = ParameterTargets(up, down)
    return launches(step.x, step.dout, weights, step.routing, step.settings, targets)


def _launch(step: Step, calls: Calls, product: str) -> Callable[[], None]:
    """A launcher of one product on buffers of its own."""
    r, hidden, inner = step.routing.num_rows, step.hidden, step.intermediate
    w1, w2, prob = step.weights.w1, step.weights.w2, step.routing.row_prob

    def rows_of(width: int) -> torch.Tensor:
        return torch.randn((r, width), device="cuda").bfloat16()

    of = index_of(calls, step.routing)
    sums = step.accumulators
    if product == "up":
        call = calls.up(step.x, w1, None, rows_of(2 * inner), rows_of(inner), of)
    elif product == "down":
        call = calls.down(rows_of(inner), w2, None, rows_of(hidden), of)
    elif product == "dgrad":
        call = calls.dgrad(rows_of(2 * inner), w1, rows_of(hidden), of)
    elif product == "dgated":
        partials = torch.empty((calls.dprob_tiles, r), device="cuda")
        z, dz, y1s = rows_of(2 * inner), rows_of(2 * inner), rows_of(inner)
        call = calls.dgated(step.dout, w2, z, dz, y1s, prob, partials, of)
    elif product == "wgrad_up":
        place = native_place(product, calls, sums.dw1)
        call = calls.wgrad_up(step.x, rows_of(2 * inner), place, of)
    else:
        place = native_place(product, calls, sums.dw2)
        call = calls.wgrad_down(step.dout, rows_of(inner), place, of)
    return call.launch


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    help="T,H,I,E,K; by default those of docs/lab/layer_times.md.",
)
@click.option("--sweep", "do_sweep", is_flag=True, help="Time every product in every tiling.")
@click.option("--product", "products", multiple=True, type=click.Choice(PRODUCTS))
def main(
    json_path: Path | None, shapes: tuple[str, ...], do_sweep: bool, products: tuple[str, ...]
) -> None:
    """Time forward and backward of the Triton engine beside the BF16 engine's."""
    wanted = [tuple(map(int, shape.split(","))) for shape in shapes] or list(SHAPES)
    report: list[dict[str, Any]] = []
    for shape in wanted:
        if do_sweep:
            found = sweep(shape, products or PRODUCTS)
            click.echo(f"T,H,I,E,K = {','.join(map(str, shape))}")
            for _, group in itertools.groupby(found, key=lambda row: row["product"]):
                for row in group:
                    words = row["tiling"].replace("Tiling", "")
                    line = f"{row['product']:11} {row['us']:8.1f} us {row['tflops']:5.0f} TFLOPS"
                    click.echo(f"{line}  {words}")
            report += found
        else:
            compile_all(jobs_of(shape[1], shape[2]))
            pair = compare(shape)
            show(pair)
            report += pair
        torch.cuda.empty_cache()
        if json_path:
            json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
