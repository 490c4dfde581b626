#!/usr/bin/env python3
"""Time both weight-gradient GEMMs with their sums in the native accumulators, with the flush behind them,
added straight into every parameter's own fp32 `main_grad`, and written there in fp32 or bf16.

    python benchmarks/wgrad_bench.py [--baseline FOLDER] [--json FILE]
    python benchmarks/wgrad_bench.py --shape 16384 2048 768 128 8    # T H I E K

The variants of one shape are captured in CUDA graphs and replayed in turns, so that all see the
same clocks. `--baseline` adds the kernel of another tree, whose `sonicmoe/kernels` lies in FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_timing import host_us, interleaved_us

from sonicmoe.engine.footprint import Footprint
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.hopper_passes import Passes, passes_on
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.targets import FreshTargets, NativeBuffer, ParameterTargets
from sonicmoe.enums import ActivationType
from sonicmoe.gradients import destinations as gradients
from sonicmoe.interop import current_stream
from sonicmoe.jit.cuda_source import CudaSource
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
CALLS = 2  # in one graph
ERNIE = WeightLayout(transposed=True, split_half=True)
Call = Callable[[int], object]


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

        def call(_: int) -> None:
            stream = current_stream(self.offsets)
            kernel(*self.dout, *self.y1s, self.offsets, dw2, 0, stream)
            kernel(*self.dz, *self.x, self.offsets, dw1, 0, stream)

        return call

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of one expert's parameters."""
        return (self.hidden, 2 * self.inner), (self.inner, self.hidden)

    def own(self, dtype: torch.dtype = torch.float32) -> ParameterTargets:
        """A tensor for every parameter."""
        made = (
            [torch.zeros(shape, device="cuda", dtype=dtype) for _ in range(self.experts)]
            for shape in self.shapes
        )
        return ParameterTargets(*(WeightTarget.per_expert(tensors, ERNIE) for tensors in made))

    def stacked(self, dtype: torch.dtype = torch.float32) -> ParameterTargets:
        """One tensor of all experts for each projection."""
        made = (
            torch.zeros((self.experts, *shape), device="cuda", dtype=dtype) for shape in self.shapes
        )
        return ParameterTargets(
            *(WeightTarget.stacked(tensor, self.experts, ERNIE) for tensor in made)
        )


def variants(
    layer: Layer, passes: Passes, baseline: Path | None
) -> tuple[dict[str, Call], list[Any]]:
    """`name -> call`, and what must stay alive: launches know addresses only."""
    module = fp8_wgrad_source("sm_90a").load()
    sums = NativeBuffer.zeros(
        layer.experts, 2 * layer.inner, layer.hidden, layer.inner, False, "cuda"
    )
    native = layer.into(module.grouped_wgrad, sums.dw1, sums.dw2)
    held: list[Any] = [sums]
    calls: dict[str, Call] = {}
    if baseline is not None:
        folder = baseline / "sonicmoe" / "kernels" / "sm90" / "fp8_wgrad.cu"
        other = CudaSource.make("fp8_wgrad", folder, arch="sm_90a").load()
        calls["accumulators, baseline"] = layer.into(other.grouped_wgrad, sums.dw1, sums.dw2)
    calls["accumulators"] = native
    own, stacked = layer.own(), layer.stacked()
    every = {
        "direct, own": own,
        "direct, stacked": stacked,
        "written fp32, own": FreshTargets.like(own),
        "written fp32, stacked": FreshTargets.like(stacked),
        "written bf16, own": FreshTargets.like(layer.own(torch.bfloat16)),
        "written bf16, stacked": FreshTargets.like(layer.stacked(torch.bfloat16)),
    }
    for name, targets in every.items():
        made = passes.gradients(targets)
        calls[name] = layer.into(module.grouped_wgrad_into, made["into_dw1"], made["into_dw2"])
        held.append(targets)
    flush = flush_of(layer, sums, own)

    def flushed(number: int) -> None:
        native(number)
        flush()

    calls["accumulators and flush"] = flushed
    return calls, held


def flush_of(layer: Layer, sums: NativeBuffer, targets: ParameterTargets) -> Callable[[], None]:
    """Into the parameters' fp32 memory."""
    kernel = flush_source("sm_90a").load()
    tensors = targets.tensors()
    places = [gradients.Destination(tensor, tensor, False) for tensor in tensors]
    table = gradients.destination_table(places, layer.experts, kernel)

    def flush() -> None:
        stream = current_stream(sums.dw1)
        kernel.flush_gradients(sums.dw1, sums.dw2, table, True, True, stream)

    return flush


def anew(weight: WeightTarget) -> WeightTarget:
    """The same memory as other tensors."""
    return replace(weight, tensors=[t if t is None else t.detach() for t in weight.tensors])


def host_times(layer: Layer, passes: Passes) -> dict[str, float]:
    """Microseconds of host time to learn where a backward's gradients go, and with both launches."""
    targets, kernel = layer.own(), fp8_wgrad_source("sm_90a").load().grouped_wgrad_into
    up, down, engine, settings = targets.up, targets.down, HopperEngine(), EngineSettings()
    last: list[Footprint | None] = [None]

    def asked(given: ParameterTargets) -> object:
        """All that a backward asks of its targets."""
        sizes = (2 * layer.inner, layer.hidden, layer.inner)
        if given.problem(*sizes, "cuda:0") or engine.problem_of(given, settings):
            raise RuntimeError("these targets do not fit")
        return passes.gradients(given)

    def recognised(_: int) -> object:
        given = ParameterTargets(up, down)
        last[0] = given.recognise(last[0])
        return asked(given)

    def views(_: int) -> object:
        given = ParameterTargets(anew(up), anew(down))
        last[0] = given.recognise(last[0])
        return asked(given)

    def not_recognised(_: int) -> object:
        return asked(ParameterTargets(up, down))

    def found(_: int) -> object:
        return passes.gradients(ParameterTargets(up, down))

    def moved(_: int) -> object:
        passes._destinations._made.clear()
        return passes.gradients(targets)

    def launched(_: int) -> object:
        made = passes.gradients(targets)
        return layer.into(kernel, made["into_dw1"], made["into_dw2"])(0)

    def moved_and_launched(_: int) -> object:
        passes._destinations._made.clear()
        return launched(0)

    def checked(_: int) -> object:
        return targets.copy_engine_problem()

    times = {
        "recognised": recognised, "recognised through new views": views,
        "not recognised": not_recognised,
        "same memory": found, "memory moved": moved, "checks of moved memory": checked,
        "same memory, launches": launched, "memory moved, launches": moved_and_launched,
    }  # fmt: skip
    return {name: host_us(call, 50) for name, call in times.items()}


@click.command()
@click.option(
    "--baseline", type=click.Path(path_type=Path, exists=True), help="Folder of another tree."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option("--rounds", default=20, show_default=True, help="Timed replays of each variant.")
@click.option(
    "--shape", "shapes", type=int, nargs=5, multiple=True, default=SHAPES, help="T H I E K."
)
def main(
    baseline: Path | None,
    json_path: Path | None,
    rounds: int,
    shapes: tuple[tuple[int, int, int, int, int], ...],
) -> None:
    """Print microseconds of every variant at every shape."""
    report, passes = [], passes_on("cuda:0", ActivationType.SWIGLU)
    for shape in shapes:
        layer = Layer(*shape)
        calls, held = variants(layer, passes, baseline)
        times = interleaved_us(calls, CALLS, rounds)
        for name, (median, smallest) in times.items():
            report.append({"shape": shape, "name": name, "us": median, "smallest": smallest})
            ratio = median / times["accumulators"][0]
            click.echo(
                f"{shape!s:30} {name:26} {median:8.1f} us (min {smallest:8.1f}) {ratio:6.3f}"
            )
        for name, us in host_times(layer, passes).items():
            report.append({"shape": shape, "name": f"host, {name}", "us": us})
            click.echo(f"{shape!s:30} host: {name:24} {us:8.1f} us")
        del layer, calls, held
        torch.cuda.empty_cache()
    if json_path:
        json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
