#!/usr/bin/env python3
"""Time a layer beside a copy on another stream, with the GEMMs on all multiprocessors and on fewer
(`gemm_num_sms`).

    python benchmarks/shared_gpu_bench.py [--engine hopper|bf16] [--json FILE]

The copy stands for a collective: a few thread blocks that move memory and are launched while the
layer runs. A GEMM that holds every multiprocessor makes them wait until it ends.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sonicmoe.bench.runner import machine
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import Call, Layer, Variant, rotating_batches
from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import EngineName
from sonicmoe.ernie_compat import SonicMoEMlpNode

SHAPE = Shape(8192, 3072, 1536, 8, 8)
COPY_BLOCKS, COPY_BYTES = 16, 512 << 20
LEFT = (0, 4, 8, 16, 32)  # multiprocessors that the GEMMs leave to others
BLOCK = 8192  # elements that a thread block moves at a time


@dataclass(frozen=True)
class Row:
    """Medians in microseconds. layer, copy: with nothing beside them. layer_beside, copy_beside: of
    both together, each from the common start to its own end.
    """

    gemm_num_sms: int
    layer: float
    copy: float
    layer_beside: float
    copy_beside: float


def copy_kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Moves one tensor into another in `COPY_BLOCKS` thread blocks."""
    import triton
    import triton.language as tl

    @triton.jit
    def move(source, target, count, step, block: tl.constexpr):  # type: ignore[no-untyped-def]
        offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        while tl.min(offset, 0) < count:
            tl.store(target + offset, tl.load(source + offset, mask=offset < count), offset < count)
            offset += step

    def launch(source: torch.Tensor, target: torch.Tensor) -> None:
        move[(COPY_BLOCKS,)](source, target, source.numel(), COPY_BLOCKS * BLOCK, block=BLOCK)

    return launch


class Beside:
    """A layer's forward and backward on the current stream, and a copy on another."""

    def __init__(self, shape: Shape, engine: EngineName, rounds: int) -> None:
        """Nothing is timed yet."""
        self._variant, self._layer = Variant.parse(engine.value), Layer(shape, "cuda")
        self._batches, self._rounds = rotating_batches(shape, "cuda"), rounds
        self._source = torch.randn(COPY_BYTES // 4, device="cuda")
        self._target, self._move = torch.empty_like(self._source), copy_kernel()
        self._stream = torch.cuda.Stream()
        self._wanted = 0

    def row(self, gemm_num_sms: int) -> Row:
        """Figures of one setting."""
        config = SonicMoEConfig(
            fp8_mode=self._variant.mode, engine=self._variant.engine, gemm_num_sms=gemm_num_sms
        )
        shape = self._layer.shape
        sizes = shape.experts, shape.hidden, shape.intermediate
        node = SonicMoEMlpNode(self._layer.experts, *sizes, config=config)
        self._times(node, layer=True, copy=True)  # compiles and warms up
        # The three take turns, so that they see the same clocks.
        alone, copies, both = [], [], []
        for _ in range(self._rounds):
            alone.append(self._times(node, layer=True, copy=False)[0])
            copies.append(self._times(node, layer=False, copy=True)[1])
            both.append(self._times(node, layer=True, copy=True))
        layers, moved = zip(*both, strict=True)
        figures = [statistics.median(times) for times in (alone, copies, layers, moved)]
        return Row(gemm_num_sms, *figures)

    def _times(self, node: SonicMoEMlpNode, *, layer: bool, copy: bool) -> tuple[float, float]:
        """Microseconds from the start to the end of each; 0 for one that does not run."""
        start, layer_end, copy_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        # The host launches both behind this, so that neither waits for the host.
        torch.cuda._sleep(4_000_000)
        start.record()
        self._stream.wait_event(start)
        if layer:
            self._wanted += 1
            call = Call(node, self._batches[self._wanted % len(self._batches)])
            call.forward()
        if copy:
            with torch.cuda.stream(self._stream):
                self._move(self._source, self._target)
                copy_end.record()
        if layer:
            call.backward()
        layer_end.record()
        torch.cuda.synchronize()
        return (
            1e3 * start.elapsed_time(layer_end) if layer else 0.0,
            1e3 * start.elapsed_time(copy_end) if copy else 0.0,
        )


def settings_in_turn(multiprocessors: int) -> list[int]:
    """Values of `gemm_num_sms`: all, and all but those of `LEFT`."""
    return [multiprocessors - left if left else EngineSettings().gemm_num_sms for left in LEFT]


def table(rows: list[Row]) -> str:
    """Markdown; ratios are to the layer and the copy alone, on all multiprocessors."""
    heads = ("GEMMs on", "layer alone", "copy alone", "layer beside", "copy beside", "both done")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        done = max(row.layer_beside, row.copy_beside)
        times = (row.layer, row.copy, row.layer_beside, row.copy_beside, done)
        cells = [str(row.gemm_num_sms or "all"), *(f"{time:.0f}" for time in times)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
@click.option(
    "--engine", type=click.Choice(["hopper", "bf16"]), default="hopper", show_default=True
)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures too.")
def main(engine: str, rounds: int, json_file: Path | None) -> None:
    """Print microseconds of a layer and a copy, alone and beside each other."""
    if not torch.cuda.is_available():
        raise click.ClickException("this needs an NVIDIA GPU: a host has no multiprocessors")
    beside = Beside(SHAPE, EngineName(engine), rounds)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    rows = [beside.row(wanted) for wanted in settings_in_turn(count)]
    click.echo(f"{engine}, {SHAPE}, {COPY_BYTES >> 20} MiB copied by {COPY_BLOCKS} thread blocks\n")
    click.echo(table(rows))
    if json_file is not None:
        figures = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
