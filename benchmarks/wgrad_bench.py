#!/usr/bin/env python3
"""Time both weight-gradient GEMMs with their sums in the native accumulators, with the flush behind them,
added straight into every parameter's own fp32 `main_grad`, and written there in fp32 or bf16.

    python benchmarks/wgrad_bench.py [--json FILE]
    python benchmarks/wgrad_bench.py --shape 16384 2048 768 128 8    # T H I E K

The variants of one shape take turns launch by launch, so that all see the same clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import timing
import torch

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.hopper_passes import Passes, passes_on
from sonicmoe.engine.settings import GradientMode
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ActivationType
from sonicmoe.gradients.flush import flush_table
from sonicmoe.interop import current_stream
from sonicmoe.kernels.cuda_wgrad import flush_source
from sonicmoe.kernels.sm90 import fp8_wgrad_source
from sonicmoe.layouts import WeightLayout

Tensor = torch.Tensor
# (T, H, I, E, K)
SHAPES = (
    (8192, 3072, 1536, 8, 8),
    (8192, 3072, 1536, 32, 8),
    (8192, 3072, 1536, 128, 8),
    (16384, 2048, 768, 128, 8),
)
ERNIE = WeightLayout(transposed=True, split_half=True)
Call = Callable[[], object]


class Layer:
    """Operands of both products as random codes, balanced over the experts."""

    def __init__(self, tokens: int, hidden: int, inner: int, experts: int, topk: int) -> None:
        each = -(-tokens * topk // experts // 128) * 128
        rows = each * experts
        self.experts, self.hidden, self.inner = experts, hidden, inner
        self.offsets = torch.arange(experts + 1, device="cuda") * each
        self.dz, self.x = self._operand(2 * inner, rows), self._operand(hidden, rows)
        self.dout, self.y1s = self._operand(hidden, rows), self._operand(inner, rows)

    @staticmethod
    def _operand(size: int, rows: int) -> tuple[Tensor, Tensor]:
        # Random bits draw the power of a training step, which constant ones do not.
        codes = torch.randint(0, 256, (size, rows), dtype=torch.uint8, device="cuda")
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        return codes, torch.rand((-(-size // 128), rows // 128), device="cuda") + 0.5

    def into(self, kernel: Any, dw1: Any, dw2: Any) -> Call:
        """Both products by that kernel."""

        def call() -> None:
            stream = current_stream(self.offsets)
            kernel(*self.dout, *self.y1s, self.offsets, dw2, 0, stream)
            kernel(*self.dz, *self.x, self.offsets, dw1, 0, stream)

        return call

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one expert's two parameters."""
        return (self.hidden, 2 * self.inner), (self.inner, self.hidden)

    def own(self, dtype: torch.dtype = torch.float32) -> GradientTargets:
        """A tensor for every parameter."""
        made = (
            [torch.zeros(shape, device="cuda", dtype=dtype) for _ in range(self.experts)]
            for shape in self.shapes
        )
        return GradientTargets(*(GradientPlaces.per_expert(tensors, ERNIE) for tensors in made))

    def stacked(self, dtype: torch.dtype = torch.float32) -> GradientTargets:
        """One tensor of all experts for each projection."""
        made = (
            torch.zeros((self.experts, *shape), device="cuda", dtype=dtype) for shape in self.shapes
        )
        return GradientTargets(
            *(GradientPlaces.stacked(tensor, self.experts, ERNIE) for tensor in made)
        )


def variants(layer: Layer, passes: Passes) -> tuple[dict[str, Call], list[Any]]:
    """`name -> call`, and what must stay alive: launches know addresses only."""
    module = fp8_wgrad_source("sm_90a").load()
    sums = GradientTargets.zeros(
        layer.experts, 2 * layer.inner, layer.hidden, layer.inner, False, "cuda"
    )
    held: list[Any] = []
    calls: dict[str, Call] = {}
    own, stacked = layer.own(), layer.stacked()
    every = {
        "accumulators": sums,
        "direct, own": own,
        "direct, stacked": stacked,
        "written fp32, own": written(own),
        "written fp32, stacked": written(stacked),
        "written bf16, own": written(layer.own(torch.bfloat16)),
        "written bf16, stacked": written(layer.stacked(torch.bfloat16)),
    }
    for name, targets in every.items():
        made = passes.gradients(targets)
        calls[name] = layer.into(module.grouped_wgrad, made["dw1"], made["dw2"])
        held.append(targets)
    flush = flush_of(layer, sums, own)

    def flushed() -> None:
        calls["accumulators"]()
        flush()

    calls["accumulators and flush"] = flushed
    return calls, held


def written(targets: GradientTargets) -> GradientTargets:
    """The memory of targets, written and not added to."""
    return replace(targets, mode=GradientMode.FRESH)


def flush_of(layer: Layer, sums: GradientTargets, targets: GradientTargets) -> Callable[[], None]:
    """Into the parameters' fp32 memory."""
    kernel = flush_source("sm_90a").load()
    table = flush_table(kernel, targets, [False] * len(targets.tensors()))

    def flush() -> None:
        stream = current_stream(sums.dw1)
        kernel.flush_gradients(sums.dw1, sums.dw2, table, True, True, stream)

    return flush


@click.command()
@timing.rounds_option(20)
@click.option(
    "--shape", "shapes", type=int, nargs=5, multiple=True, default=SHAPES, help="T H I E K."
)
@timing.json_option
def main(
    rounds: int, shapes: tuple[tuple[int, int, int, int, int], ...], json_file: Path | None
) -> None:
    """Print microseconds of every variant at every shape."""
    timing.device_of(quick=False)
    report, passes = [], passes_on("cuda:0", ActivationType.SWIGLU)
    for shape in shapes:
        layer = Layer(*shape)
        calls, held = variants(layer, passes)
        times = timing.launches_us(calls, rounds)
        report.append({"shape": shape, "us": times})
        rows = (
            (name, timing.cell(us, ".1f"), timing.cell(us / times["accumulators"], ".3f"))
            for name, us in times.items()
        )
        click.echo(timing.markdown((str(shape), "us", "of accumulators"), rows) + "\n")
        del layer, calls, held
        torch.cuda.empty_cache()
    timing.write_figures(json_file, shapes=report)


if __name__ == "__main__":
    main()
