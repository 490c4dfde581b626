#!/usr/bin/env python3
"""GPU time and memory of one layer under other activations, with biases and with another code of z,
against SwiGLU with z in INT8. All run in one process and take turns.

    benchmarks/settings_bench.py                     # one Hopper GPU, the reference shape
    benchmarks/settings_bench.py --sizes gpt-oss     # at the sizes of gpt-oss-20b
    benchmarks/settings_bench.py --device cpu        # tiny, on the reference engine: is the program right?

| column | what |
|---|---|
| forward, backward | median microseconds by the device's clock, the host ahead of the GPU; weights are prepared and get bf16 `.grad` |
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
from sonicmoe.bench.workload import Batch, rotating_batches
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp

REFERENCE, GPT_OSS = Shape(8192, 3072, 1536, 8, 8), Shape(8192, 2880, 2880, 32, 4)
SIZES = {"reference": REFERENCE, "gpt-oss": GPT_OSS}
TINY = Shape(48, 128, 64, 4, 2)  # of a CPU
PARAMETERS = {
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 25.0)),
    ActivationType.SWIGLU_CLAMP: (("limit", 7.0),),
}
WARM_UPS = 3


class Setting(NamedTuple):
    """What a layer is made with."""

    activation: ActivationType
    save_z: str = "int8"
    recompute_z: bool = False
    biases: bool = False

    def __str__(self) -> str:
        z = "recomputed" if self.recompute_z else self.save_z
        return f"{self.activation.value}{', biases' * self.biases}, z {z}"


SETTINGS = [
    Setting(ActivationType.SWIGLU),
    Setting(ActivationType.SWIGLU, biases=True),
    Setting(ActivationType.SWIGLU, "bf16"),
    Setting(ActivationType.SWIGLU, recompute_z=True),
    Setting(ActivationType.SWIGLU_CLAMP),
    Setting(ActivationType.SWIGLU_OAI),
    Setting(ActivationType.SWIGLU_OAI, biases=True),
    Setting(ActivationType.SITU_GLU),
    Setting(ActivationType.SITU_GLU, "bf16"),
    Setting(ActivationType.GEGLU),
    Setting(ActivationType.GEGLU_TANH),
]


class Figures(NamedTuple):
    """Microseconds and MiB of one setting."""

    forward: float
    backward: float
    kept: float
    peak: float


class Weights(NamedTuple):
    """Of one layer, bf16, native: `w1 [E, 2I, H]`, `w2 [E, H, I]`, `b1 [E, 2I]`, `b2 [E, H]`."""

    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor
    b2: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, device: str) -> Weights:
        """Normal, of variance 1 / fan_in; biases of variance 1, as the products have."""
        experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        sizes = ((2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,))
        made = []
        for size in sizes:
            scale = size[-1] ** -0.5 if len(size) == 2 else 1.0
            values = torch.randn((experts, *size), device=device, dtype=torch.bfloat16)
            made.append(values.mul_(scale).requires_grad_())
        return cls(*made)

    def clear(self) -> None:
        """Drop all gradients."""
        for weight in self:
            weight.grad = None


class Call:
    """One forward and backward of a batch under a setting."""

    def __init__(self, setting: Setting, engine: str, weights: Weights, batch: Batch) -> None:
        self.setting, self.weights, self.batch = setting, weights, batch
        self.config = SonicMoEConfig(
            fp8_mode="perf",
            engine=engine,
            save_z=setting.save_z,
            recompute_z=setting.recompute_z,
        )
        self.out: torch.Tensor | None = None

    def clear(self) -> None:
        """Drop the gradients, and an output that had no backward."""
        self.weights.clear()
        self.batch.x.grad = self.batch.probs.grad = self.out = None

    def settle(self) -> None:
        """Both passes, before others that are measured: all settings have the same weights, and
        each drops the codes that another one kept of them.
        """
        self.clear()
        self.forward()
        self.backward()
        self.clear()

    def forward(self) -> None:
        """Tokens to output."""
        setting, batch = self.setting, self.batch
        w1, w2, b1, b2 = self.weights
        biases = (b1, b2) if setting.biases else (None, None)
        with self.config.activate():
            self.out = expert_mlp(
                *(batch.x, batch.indices, batch.probs, w1, w2, *biases, setting.activation),
                parameters=PARAMETERS.get(setting.activation, ()),
            )

    def backward(self) -> None:
        """Gradients of tokens, probabilities, weights and biases."""
        assert self.out is not None
        out, self.out = self.out, None
        out.backward(self.batch.dout)


class Times:
    """Forward and backward of one setting, again and again."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.found: list[tuple[float, float]] = []

    def round(self, call: Call) -> None:
        """One forward and backward, timed."""
        call.settle()
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
        call.settle()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        call.backward()
        torch.cuda.synchronize()
        return kept / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def measure(
    shape: Shape, device: str, rounds: int, echo: Callable[[str], None]
) -> dict[str, Figures]:
    """By setting, in the order of `SETTINGS`."""
    torch.manual_seed(0)
    weights = Weights.random(shape, device)
    engine = "hopper" if device == "cuda" else "reference"
    batches = rotating_batches(shape, device)
    times = {setting: Times(device) for setting in SETTINGS}
    for number in range(rounds + WARM_UPS):
        if number == 0:
            echo("compiling")
        for setting, each in times.items():
            each.round(Call(setting, engine, weights, batches[number % len(batches)]))
    figures = {}
    for setting, each in times.items():
        forward, backward = map(statistics.median, zip(*each.found[WARM_UPS:], strict=True))
        memory = each.memory(Call(setting, engine, weights, batches[0]))
        figures[str(setting)] = Figures(forward, backward, *memory)
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
@click.option("--sizes", type=click.Choice(list(SIZES)), default="reference", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def main(device: str, sizes: str, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    shape = SIZES[sizes] if device == "cuda" else TINY
    figures = measure(shape, device, rounds, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({name: row._asdict() for name, row in figures.items()}))
    else:
        click.echo(f"{shape}\n\n{table(figures)}")


if __name__ == "__main__":
    main()
