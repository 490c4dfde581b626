#!/usr/bin/env python3
"""GPU time and memory of one layer under other activations and another code of z, against SwiGLU with
z in INT8. All run in one process and take turns.

    benchmarks/settings_bench.py                  # one Hopper GPU
    benchmarks/settings_bench.py --device cpu     # tiny, on the reference engine: is the program right?

| column | what |
|---|---|
| forward, backward | median microseconds by the device's clock, the host ahead of the GPU; weights are prepared |
| kept | MiB between the passes |
| peak | MiB at the peak of both passes, above what lies there before |
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.timing import MIB
from sonicmoe.bench.workload import Call, Layer, rotating_batches
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode

SHAPES = {"cuda": Shape(8192, 3072, 1536, 8, 8), "cpu": Shape(48, 128, 64, 4, 2)}
PARAMETERS = {
    ActivationType.SITU_GLU: {"beta": 4.0, "linear_beta": 25.0},
    ActivationType.SWIGLU_CLAMP: {"limit": 7.0},
}
WARM_UPS = 3


class Setting(NamedTuple):
    """What a node is made with."""

    activation: ActivationType
    save_z: str
    recompute_z: bool = False

    def __str__(self) -> str:
        z = "recomputed" if self.recompute_z else self.save_z
        return f"{self.activation.value}, z {z}"


SETTINGS = [
    Setting(ActivationType.SWIGLU, "int8"),
    Setting(ActivationType.SWIGLU, "bf16"),
    Setting(ActivationType.SWIGLU, "int8", recompute_z=True),
    Setting(ActivationType.SWIGLU_CLAMP, "int8"),
    Setting(ActivationType.SITU_GLU, "int8"),
    Setting(ActivationType.SITU_GLU, "bf16"),
    Setting(ActivationType.GEGLU, "int8"),
]


class Figures(NamedTuple):
    """Microseconds and MiB of one setting."""

    forward: float
    backward: float
    kept: float
    peak: float


class Times:
    """Forward and backward of one node, again and again."""

    def __init__(self, layer: Layer, setting: Setting, engine: str) -> None:
        shape, self.device = layer.shape, layer.device
        config = SonicMoEConfig(
            fp8_mode="perf",
            engine=engine,
            save_z=setting.save_z,
            recompute_z=setting.recompute_z,
        )
        self.node = SonicMoEMlpNode(
            layer.experts,
            *(shape.experts, shape.hidden, shape.intermediate),
            config=config,
            activation_type=setting.activation,
            activation_parameters=PARAMETERS.get(setting.activation),
        )
        self.found: list[tuple[float, float]] = []

    def round(self, call: Call) -> None:
        """One forward and backward, timed."""
        if self.device == "cpu":
            marks = [time.perf_counter()]
            for phase in (call.forward, call.backward):
                phase()
                marks.append(time.perf_counter())
            self.found.append((1e6 * (marks[1] - marks[0]), 1e6 * (marks[2] - marks[1])))
            return
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # the host launches everything behind it
        events[0].record()
        call.forward()
        events[1].record()
        call.backward()
        events[2].record()
        torch.cuda.synchronize()
        self.found.append(
            (1e3 * events[0].elapsed_time(events[1]), 1e3 * events[1].elapsed_time(events[2]))
        )

    def memory(self, call: Call) -> tuple[float, float]:
        """MiB kept between the passes, and at the peak."""
        if self.device == "cpu":
            return 0.0, 0.0
        call.clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        call.backward()
        torch.cuda.synchronize()
        return kept / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def measure(device: str, rounds: int, echo: Callable[[str], None]) -> dict[str, Figures]:
    """By setting, in the order of `SETTINGS`."""
    layer = Layer(SHAPES[device], device)
    engine = "hopper" if device == "cuda" else "reference"
    batches = rotating_batches(layer.shape, device)
    times = {str(setting): Times(layer, setting, engine) for setting in SETTINGS}
    for number in range(rounds + WARM_UPS):
        if number == 0:
            echo("compiling")
        for each in times.values():
            each.round(Call(each.node, batches[number % len(batches)]))
    figures = {}
    for name, each in times.items():
        forward, backward = map(statistics.median, zip(*each.found[WARM_UPS:], strict=True))
        figures[name] = Figures(forward, backward, *each.memory(Call(each.node, batches[0])))
    return figures


def table(figures: dict[str, Figures]) -> str:
    """Markdown; the sum is compared with that of the first row."""
    first = next(iter(figures.values()))
    lines = [
        "| setting | forward | backward | sum | of the first | kept | peak |",
        "|---" * 7 + "|",
    ]
    for name, row in figures.items():
        both = row.forward + row.backward
        share = both / (first.forward + first.backward)
        lines.append(
            f"| {name} | {row.forward:.0f} | {row.backward:.0f} | {both:.0f} | {share:.3f} "
            f"| {row.kept:.0f} | {row.peak:.0f} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def main(device: str, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    figures = measure(device, rounds, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({name: row._asdict() for name, row in figures.items()}))
    else:
        click.echo(f"{SHAPES[device]}\n\n{table(figures)}")


if __name__ == "__main__":
    main()
