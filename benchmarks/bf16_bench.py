#!/usr/bin/env python3
"""Time the BF16 engine on the GPU: every kernel of a forward and backward, the GPU's busy time, and
the wall time.

Busy time is the sum of the kernels' times, from the profiler; wall time is the host's clock; both
over rows of steps that take turns, so their ratio says how much of a step the GPU waits. `--sweep`
times every product alone with every tiling that quack-kernels offers on Blackwell: its relative times
belong in the table of `quack_tilings`. Each product of Hopper has `bf16_products.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_timing import idle, median_us

from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
from sonicmoe.engine.capabilities import BF16
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.settings import Workload
from sonicmoe.enums import ActivationType
from sonicmoe.jit import default_cache
from sonicmoe.jit.plan import CompileJob, ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.kernels import cuda_sources, quack_gemm
from sonicmoe.kernels.quack_gemm import MlpShape
from sonicmoe.kernels.quack_tilings import FAMILIES, GemmConfig
from sonicmoe.routing.backends import arch_of
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.metadata import RoutingMetadata

Tensor = torch.Tensor
REFERENCE = (8192, 3072, 1536, 8, 8)
STEPS, ROUNDS, REST_S = 20, 5, 0.3
TOKENS = (1024, 2048, 4096, 8192, 16384)
# The launches of a step on Hopper, in their order.
FORWARD = ("up", "down", "combine")
BACKWARD = (
    *("dgated", "index", "dprob sums", "dgrad", "combine dx", "dprobs"),
    *("wgrad down", "wgrad up"),
)
PRODUCTS = ("up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up")
SM100_TILES = [((256, n), (2, 1)) for n in (128, 192, 256, 512)]
SM100_TILES += [((128, n), (1, 1)) for n in (128, 192, 256)]
SM120_TILES = [((m, n), True) for m, n in ((128, 128), (128, 64), (64, 128), (128, 160))]
SM120_TILES += [((m, n), False) for m, n in ((128, 128), (128, 160), (128, 192))]


def jobs_of(hidden: int, intermediate: int) -> list[CompileJob]:
    """What a step launches on the GPU that this runs on."""
    arch = arch_of("cuda:0")
    return [*cuda_sources(arch), *BF16.jobs(Workload(EngineSettings(), hidden, intermediate), arch)]


class Step:
    """Operands and engine at `(T, H, I, E, K)`, on random data and balanced random routing."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Allocate and fill everything."""
        tokens, hidden, intermediate, experts, topk = shape
        self.hidden, self.intermediate = hidden, intermediate
        self.settings, self.engine = EngineSettings(), Bf16Engine()
        w1 = torch.randn((experts, 2 * intermediate, hidden), device="cuda") * hidden**-0.5
        w2 = torch.randn((experts, hidden, intermediate), device="cuda") * intermediate**-0.5
        self.weights = self.engine.prepare_weights(
            w1.bfloat16(), w2.bfloat16(), None, None, self.settings
        )
        self.x, self.dout = (
            torch.randn((tokens, hidden), device="cuda").bfloat16() for _ in range(2)
        )
        indices = torch.rand((tokens, experts), device="cuda").topk(topk, 1).indices
        counts = torch.bincount(indices.reshape(-1), minlength=experts).tolist()
        probs = torch.rand((tokens, topk), device="cuda")
        self.routing: RoutingMetadata = build_routing(indices, probs, experts, counts)
        self.accumulators = NativeBuffer.zeros(
            experts, 2 * intermediate, hidden, intermediate, False, "cuda"
        )

    def forward(self) -> Any:
        """One forward that keeps what backward needs."""
        return self.engine.forward(self.x, self.routing, self.weights, self.settings)

    def both(self) -> None:
        """One forward and backward."""
        _, saved = self.forward()
        assert saved is not None
        self.engine.backward(self.dout, saved, self.weights, self.accumulators)

    def products(self) -> dict[str, Callable[[Any], Callable[[], None]]]:
        """`name -> launcher of that product` for loaded `GroupedGemms`, on buffers of its own."""
        r, rows = self.routing.num_rows, ExpertRows.of(self.routing)
        hidden, intermediate = self.hidden, self.intermediate
        w1, w2, prob = self.weights.w1, self.weights.w2, self.routing.row_prob
        z, dz = (torch.randn((r, 2 * intermediate), device="cuda").bfloat16() for _ in range(2))
        y1, y1s = (torch.randn((r, intermediate), device="cuda").bfloat16() for _ in range(2))
        y2, dx = (torch.empty((r, hidden), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        partials, target = (
            torch.empty((r * -(-intermediate // 64),), device="cuda"),
            torch.empty_like(z),
        )
        cu, index, acc = rows.cu_rows, rows.gather_index, self.accumulators

        def dgated(gemms: Any) -> Callable[[], None]:
            sums = partials[: r * gemms.dprob_tiles].reshape(r, gemms.dprob_tiles)
            return lambda: gemms.dgated(self.dout, w2, target, z, y1s, prob, sums, cu, index)

        return {
            "up": lambda gemms: lambda: gemms.up(self.x, w1, z, y1, None, cu, index),
            "down": lambda gemms: lambda: gemms.down(y1, w2, y2, None, cu),
            "dgated": dgated,
            "dgrad": lambda gemms: lambda: gemms.dgrad(dz, w1, dx, cu),
            "wgrad_down": lambda gemms: (
                lambda: gemms.wgrad_down(self.dout, y1s, acc.dw2, cu, index)
            ),
            "wgrad_up": lambda gemms: lambda: gemms.wgrad_up(self.x, dz, acc.dw1, cu, index),
        }


@dataclass(frozen=True)
class Timing:
    """Microseconds of one step: by the host's clock, and of its kernels in launch order."""

    wall: float
    kernels: list[tuple[str, float]]

    @property
    def busy(self) -> float:
        """The GPU's time in kernels."""
        return sum(time_us for _, time_us in self.kernels)


def timed(step: Callable[[], Any], labels: tuple[str, ...]) -> Timing:
    """Medians over rounds, each a row of steps by the clock, then one under the profiler, both on a
    GPU that has just rested.
    """
    for _ in range(3):
        step()
    walls, profiles = [], []
    for _ in range(ROUNDS):
        walls.append(wall_row(step))
        profiles.append(profiled_row(step))
    names = [name for name, _ in profiles[0]]
    medians = [statistics.median(us for _, us in launch) for launch in zip(*profiles, strict=True)]
    used = labels if len(labels) == len(names) else names
    return Timing(statistics.median(walls), list(zip(used, medians, strict=True)))


def wall_row(step: Callable[[], Any]) -> float:
    """Microseconds of the host's clock a step."""
    idle(REST_S)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS * 1e6


def profiled_row(step: Callable[[], Any]) -> list[tuple[str, float]]:
    """`(kernel, microseconds)` of a step's launches in their order: means over the row, as the
    clocks fall within it.
    """
    for _ in range(3):
        kernels = profiled_kernels(step)
        count, surplus = divmod(len(kernels), STEPS)
        if count and not surplus:
            return [
                (kernels[i][0], statistics.fmean(us for _, us in kernels[i::count]))
                for i in range(count)
            ]
    raise click.ClickException(f"the profiler saw {len(kernels)} kernels in {STEPS} equal steps")


def profiled_kernels(step: Callable[[], Any]) -> list[tuple[str, float]]:
    """`(kernel, microseconds)` of every launch in a row of steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        idle(REST_S)
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name[:40], event.time_range.elapsed_us()) for event in events]


def tilings(family: str) -> list[GemmConfig]:
    """What quack offers for a product of a family, at several depths of L2 reuse."""
    return {"sm100": _on_sm100, "sm120": _on_sm120}[family]()


def _on_sm100() -> list[GemmConfig]:
    return [
        GemmConfig(tile, cluster, swizzle=swizzle, clc=clc)
        for (tile, cluster), swizzle, clc in itertools.product(SM100_TILES, (8, 16), (True, False))
    ]


def _on_sm120() -> list[GemmConfig]:
    return [
        GemmConfig(tile, (1, 1), pingpong, swizzle, clc)
        for (tile, pingpong), swizzle, clc in itertools.product(SM120_TILES, (8, 16), (True, False))
    ]


def compile_all(jobs: list[CompileJob]) -> set[str]:
    """Build everything in parallel; returns the keys that failed, with the compiler's words on
    stderr.
    """
    report = warm_up(
        ModelSpec(8, 64, 64),
        default_cache(),
        jobs=os.cpu_count(),
        compile_jobs=tuple(dict.fromkeys(jobs)),
    )
    failed = [outcome for outcome in report.kernels if outcome.message]
    for outcome in failed:
        click.echo(f"{outcome.key}: {outcome.message.strip().splitlines()[-1]}", err=True)
    return {outcome.key for outcome in failed}


def sweep(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every product with every tiling, fastest first; "relative" is the time over the fastest's."""
    step = Step(shape)
    tokens, hidden, intermediate, _, topk = shape
    mlp = MlpShape(hidden, intermediate, ActivationType.SWIGLU, arch=arch_of("cuda:0"))
    family = FAMILIES[mlp.family]
    makers = {product: getattr(quack_gemm, f"{product}_kernel") for product in PRODUCTS}

    def kernel(product: str, config: GemmConfig) -> CompileJob:
        extra = {"store_z": True} if product == "up" else {}
        return makers[product](mlp, config=config, **extra)  # type: ignore[no-any-return]

    pairs = list(itertools.product(PRODUCTS, tilings(family.name)))
    failed = compile_all([kernel(*pair) for pair in pairs])
    launchers, results = step.products(), list[dict[str, Any]]()
    for product, config in pairs:
        if str(kernel(product, config).key()) in failed:
            continue
        family.candidates[product] = ((config, 1.0),)
        launch = launchers[product](
            quack_gemm.GroupedGemms(mlp, torch.cuda.get_device_properties(0).multi_processor_count)
        )
        factor = 4.0 if product in ("up", "dgrad", "wgrad_up") else 2.0
        try:
            time_us = median_us(launch, launches=15, rest=0.1)
        except RuntimeError as error:
            click.echo(f"{product} {config}: {error}", err=True)
            continue
        tflops = factor * tokens * topk * hidden * intermediate / time_us / 1e6
        results.append({"product": product, "config": str(config), "us": time_us, "tflops": tflops})
    results.sort(key=lambda row: (PRODUCTS.index(row["product"]), row["us"]))
    for _, group in itertools.groupby(results, key=lambda row: row["product"]):
        rows = list(group)
        for row in rows:
            row["relative"] = row["us"] / rows[0]["us"]
    return results


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option(
    "--sweep",
    "do_sweep",
    is_flag=True,
    help="On Blackwell, also time every product with every tiling, at the reference shape.",
)
@click.option(
    "--tokens",
    multiple=True,
    type=int,
    default=TOKENS,
    show_default=True,
    help="T of the timed steps.",
)
def main(json_path: Path | None, do_sweep: bool, tokens: tuple[int, ...]) -> None:
    """Time forward, and forward and backward, of the BF16 engine at H=3072 I=1536 E=8 K=8."""
    _, hidden, intermediate, _, topk = REFERENCE
    compile_all(jobs_of(hidden, intermediate))
    report: list[dict[str, Any]] = []
    for count in tokens:
        step = Step((count, *REFERENCE[1:]))
        flops = 18.0 * count * topk * hidden * intermediate
        for name, run, labels in (
            ("forward", step.forward, FORWARD),
            ("both", step.both, FORWARD + BACKWARD),
        ):
            timing = timed(run, labels)
            busy, wall = timing.busy, timing.wall
            work = flops if name == "both" else flops / 3
            report.append(
                {
                    "T": count,
                    "what": name,
                    "busy_us": busy,
                    "wall_us": wall,
                    "kernels": timing.kernels,
                }
            )
            click.echo(
                f"T={count:<6} {name:8} wall {wall:8.0f} us  busy {busy:8.0f} us  wall/busy {wall / busy:.3f}"
                f"  {work / wall / 1e6:5.0f} TFLOPS"
            )
            if count == REFERENCE[0]:
                click.echo(
                    "".join(
                        f"    {kernel:14} {time_us:8.1f} us\n" for kernel, time_us in timing.kernels
                    ),
                    nl=False,
                )
        del step
    if do_sweep:
        for row in sweep(REFERENCE):
            report.append(row)
            click.echo(
                f"{row['product']:11} {row['us']:8.1f} us {row['relative']:5.2f} {row['tflops']:6.0f} TFLOPS  {row['config']}"
            )
    if json_path:
        json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
