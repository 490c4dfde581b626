#!/usr/bin/env python3
"""What FP8 costs in the loss: runs that part from one state, on the same batches of text that is
read once.

    python benchmarks/loss.py branches --out runs.jsonl                  # one Hopper GPU, 9.5 minutes
    python benchmarks/loss.py pairs --preset 1b --seeds 2 --out runs.jsonl
    python benchmarks/loss.py pairs --kinds bf16,fp8,fp8-after-200 --seeds 1 --out runs.jsonl
    python benchmarks/loss.py gather runs.jsonl --to docs/data/loss_runs.jsonl.xz
    python benchmarks/loss.py report docs/data/loss_runs.jsonl.xz
    python benchmarks/loss.py branches --preset tiny --device cpu --out tiny.jsonl    # is it right?

`branches`: one run is the trunk. At each of `--points` its whole state is kept on the GPU, and every
kind of `--kinds` continues from there for `--steps` steps: BF16, FP8 in the default recipe, and BF16
whose weights were disturbed by 1e-4 of themselves, which shows how far two equal runs part. An order
is another part of the text; order 0 goes on with the trunk's own. All orders of a point come after
the trunk, one order of all points before the next, so that a run which ends early has whole orders.

`pairs`: the kinds train from the same initial weights, a seed has other weights and batches.

Every finished run is a line of `--out`, written at once; runs that are there are not repeated.
Those of another training of the trunk do not count, because they parted from another state. A
training may end elsewhere when a GPU repeats it, and a second command then adds branches of a
second trunk. A run that would end after `--minutes` is not begun. The exit code is 3 where a run is
missing.

How long it takes on an H200, 420 M parameters: 12 s until the model stands, half a minute of
compiling, 34 ms a step in BF16 and 29 in FP8, so 102 s for a trunk of 3,000 steps, 15 to 18 s for a
branch and 190 s for a pair; 1 s for each MB that is held out, which is why branches, whose trained
text is new too, hold out 1 MB and pairs 4.2. An emulated kind takes 99 to 110 ms a step, so 25 s for
200 steps with their evaluation.

Kinds: bf16, fp8, disturbed; fp8 with another storage of z (int8, z-bf16) or with weight gradients in
BF16 (wgrad-bf16); and the FP8 layer emulated, whole (emulated) or with one product, or z, in BF16
(emulated-up, -down, -dgated, -dx, -dw1, -dw2, -z). A kind with -after-N trains its first N steps in
BF16.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loss_figures import draw, tables
from loss_kinds import EMULATED, KINDS, experts_of, split_kind
from loss_model import Decoder, Training
from loss_runs import SCALE, Run, append_run, gather, read_runs
from loss_text import Text, Windows, read_text

from ernie_compat.model_config import ModelConfig, TrainConfig

EARLY = 200  # steps of a pair whose norms and loads are recorded
STARVED = 0.1  # of the mean load: an expert with less of it hardly learns
DISTURBED_BY = 1e-4
LOOK_EVERY = 50  # steps between looks at the clock
_SIZES = dict(topk=8, num_heads=16, seq_len=512)
PRESETS = {  # the model, and the sequences of a step
    "420m": (
        ModelConfig(
            hidden_size=2048, intermediate_size=1024, num_experts=16, num_layers=4, **_SIZES
        ),
        16,
    ),
    # The layer of Qwen3-30B-A3B at half its width.
    "1b": (
        ModelConfig(
            hidden_size=1024, intermediate_size=384, num_experts=128, num_layers=8, **_SIZES
        ),
        16,
    ),
    "tiny": (
        ModelConfig(
            hidden_size=32, intermediate_size=32, num_experts=4, topk=2, num_layers=2, num_heads=2,
            seq_len=16,
        ),
        4,
    ),
}  # fmt: skip


class OutOfTime(Exception):
    """The time that was given is over, or would be before a run ends."""


@dataclass
class Plan:
    """What is trained: `steps` from each of `points` of a trunk, in every kind and order."""

    preset: str
    trunk: str
    kinds: Sequence[str]
    points: Sequence[int]
    steps: int
    orders: int
    seed: int
    evaluate_every: int
    schedule: int = 0  # steps of the learning rate; 0: as many as the longest run has

    def __post_init__(self) -> None:
        self.sizes, self.batch = PRESETS[self.preset]

    def place(self, point: int, order: int) -> int:
        """The first window of a branch: order 0 goes on where the trunk was, every other one has
        windows of its own behind those.
        """
        if order == 0:
            return point * self.batch
        nth = (order - 1) * len(self.points) + list(self.points).index(point)
        return (max(self.points) + self.steps + nth * self.steps) * self.batch


@dataclass
class Lab:
    """A model, a text on the device, and the time that is left."""

    plan: Plan
    text: Text
    held_out: int  # windows
    device: str
    out: Path
    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)  # of a step, by kind
    evaluation_s: float = 0.0
    missing: list[str] = field(default_factory=list)
    trunk: list[float] = field(default_factory=list)  # losses

    def __post_init__(self) -> None:
        plan = self.plan
        length = plan.sizes.seq_len + 1
        self.windows = Windows(self.text, length, self.held_out, plan.seed, self.device)
        decoder = Decoder(plan.sizes, plan.seed, self.device, experts_of("bf16"))
        schedule = plan.schedule or max(plan.points) + plan.steps
        self.training = Training(decoder, TrainConfig(steps=schedule, lr=2e-4))
        count = sum(p.numel() for p in self.training.parameters)
        self.task = (
            f"{plan.preset}, {count / 1e6:.0f} M parameters, {plan.batch * plan.sizes.seq_len} "
            f"tokens a step, learning rate over {schedule} steps, text {self.text.name} of "
            f"{self.text.megabytes:.0f} MB"
        )
        cuda = self.device != "cpu"
        self.gpu = torch.cuda.get_device_name() if cuda else "CPU"

    def train_all(self) -> None:
        """The trunk, then every branch for which there is time."""
        plan, states = self.plan, {}
        for point in sorted(plan.points):
            if point > self.training.done:
                behind = self.training.done
                losses = self._train(plan.trunk, behind * plan.batch, point - behind)[:, 0].tolist()
                self.trunk += losses
                click.echo(f"trunk at {point}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}")
            states[point] = self.training.state()
        done = {run.key for run in read_runs(self.out)}
        todo = [
            (order, point, kind)
            for order in range(plan.orders)
            for point in plan.points
            for kind in plan.kinds
            if self._run(point, order, kind, [0] * plan.steps).key not in done
        ]
        for order, point, kind in todo:
            try:
                self._expect_time(kind)
                self.training.restore(states[point])
                append_run(self.out, self._branch(point, order, kind))
            except OutOfTime:
                self.missing.append(f"{kind} from {point}, order {order}, seed {plan.seed}")

    def _branch(self, point: int, order: int, kind: str) -> Run:
        plan = self.plan
        if kind == "disturbed":
            self.training.disturb(DISTURBED_BY, 1000 * point + order)
        figures, held_out, place = [], {}, plan.place(point, order)
        every = plan.evaluate_every or plan.steps
        for first in range(0, plan.steps, every):
            count = min(every, plan.steps - first)
            figures.append(self._train(kind, place + first * plan.batch, count))
            held_out[str(first + count)] = round(self._evaluate(), 6)
        found = torch.cat(figures).cpu()
        run = self._run(point, order, kind, (found[:, 0].double() * SCALE).round().long().tolist())
        click.echo(
            f"{kind} from {point}, order {order}, seed {plan.seed}: loss "
            f"{found[:, 0].mean():.5f}, held out {held_out}, {1e3 * self.seconds[kind]:.1f} ms a step, "
            f"{self.evaluation_s:.2f} s an evaluation, {self.deadline - time.monotonic():.0f} s left"
        )
        run = replace(run, held_out=held_out)
        if kind == plan.trunk and order == 0:
            both = list(zip(found[:, 0].tolist(), self.trunk[point:], strict=False))
            equal = sum(own == before for own, before in both)
            click.echo(f"{equal} of {len(both)} losses are those of the trunk to the bit")
        return run if point else replace(run, **self._early(found[:EARLY]))

    def _early(self, figures: torch.Tensor) -> dict[str, list]:
        """Norms and loads of the first steps, to three or four digits."""
        counts = figures[:, 2:].reshape(len(figures), -1, self.plan.sizes.num_experts).double()
        loads = counts / counts.mean(-1, keepdim=True)
        return {
            "norms": [float(f"{norm:.4g}") for norm in figures[:, 1].tolist()],
            "starved": (loads < STARVED).sum((1, 2)).tolist(),
            "busiest": loads.amax(-1).mul(100).round().div(100).tolist(),
            "idlest": loads.amin(-1).mul(100).round().div(100).tolist(),
        }

    def _run(self, point: int, order: int, kind: str, losses: list[int]) -> Run:
        plan = self.plan
        return Run(
            *(self.task, plan.trunk, plan.seed, point, order, kind, self.gpu),
            *(round(self.seconds.get(kind, 0.0), 5), losses, {}),
            state=f"{zlib.crc32(np.float32(self.trunk[:point]).tobytes()):08x}" if point else "",
        )

    def _train(self, kind: str, place: int, steps: int) -> torch.Tensor:
        """The figures of each step, fp32 `[steps, ...]` on the device."""
        training, batch, figures, since = self.training, self.plan.batch, [], 0.0
        name, in_bf16 = split_kind(kind)
        own, bf16 = experts_of(name), experts_of("bf16")
        warm = min(20, steps // 2)
        for step in range(steps):
            if step % LOOK_EVERY == 0 and time.monotonic() > self.deadline:
                raise OutOfTime
            if step == warm:
                since = self._now()
            training.decoder.experts = bf16 if training.done < in_bf16 else own
            figures.append(training.step(self.windows.train(place + step * batch, batch)))
        self.seconds[kind] = (self._now() - since) / (steps - warm)
        found = torch.stack(figures)
        if not bool(torch.isfinite(found[:, :2]).all()):
            raise click.ClickException(f"{kind}: a loss or a gradient's norm is not finite")
        return found

    def _evaluate(self) -> float:
        since = self._now()
        batches = self.windows.held_out(self.plan.batch)
        loss = self.training.evaluate(batches)
        self.evaluation_s = time.monotonic() - since
        return loss

    def _expect_time(self, kind: str) -> None:
        """Raise OutOfTime before a branch that would not fit into the time. A kind that has not run is
        expected to take twice as long as the trunk, and an emulated one four times as long.
        """
        times = 4 if kind.startswith(EMULATED) else 2
        known = self.seconds.get(kind) or times * self.seconds.get(self.plan.trunk, 0.0)
        evaluations = -(-self.plan.steps // (self.plan.evaluate_every or self.plan.steps))
        needed = self.plan.steps * known + evaluations * self.evaluation_s
        if time.monotonic() + needed > self.deadline:
            raise OutOfTime

    def _now(self) -> float:
        """The time when the device has done everything."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.monotonic()


def numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """Steps, as `500,1500`."""
    try:
        return [int(one) for one in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r}; needed: whole numbers, as 500,1500") from None


def names(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    """Kinds, as `bf16,fp8`."""
    kinds = value.split(",")
    try:
        for kind in kinds:
            split_kind(kind)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return kinds


def shared(kinds: str, steps: int, held_out: float) -> list:
    """The options of both ways to train."""
    return [
        click.option("--preset", type=click.Choice(list(PRESETS)), default="420m", show_default=True),
        click.option("--kinds", callback=names, default=kinds, show_default=True),
        click.option("--steps", type=click.IntRange(2), default=steps, show_default=True),
        click.option("--held-out", type=float, default=held_out, show_default=True, help="MB."),
        click.option("--minutes", type=float, default=9.3, show_default=True, help="From the start of the command."),
        click.option("--data", type=click.Path(path_type=Path, exists=True), multiple=True,
                     help="Files and directories with sources.  [default: this Python and its packages]"),
        click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True),
        click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True),
    ]  # fmt: skip


def train(plans: list[Plan], device: str, held_out: float, minutes: float,
          data: Sequence[Path], out: Path) -> None:  # fmt: skip
    """Every plan in turn, on one text, while there is time; the exit code says whether all ran."""
    began = time.monotonic()
    deadline = began + 60 * minutes
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("this needs a GPU, or --device cpu --preset tiny")
    text = read_text(data)
    click.echo(f"text {text.name}: {text.megabytes:.1f} MB of {text.files} files")
    length = plans[0].sizes.seq_len + 1
    batches = max(1, round(held_out * 1e6 / length / plans[0].batch))
    click.echo(f"held out: {batches * plans[0].batch * length / 1e6:.2f} MB in {batches} batches")
    missing: list[str] = []
    for plan in plans:
        lab = Lab(plan, text, batches * plan.batch, device, out, deadline)
        click.echo(f"{lab.task}, ready after {time.monotonic() - began:.0f} s")
        try:
            lab.train_all()
        except OutOfTime:
            lab.missing.append(f"everything from seed {plan.seed}: the trunk did not end")
        missing += lab.missing
        del lab
    for line in missing:
        click.echo(f"not run for want of time: {line}")
    click.echo(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(3 if missing else 0)


@click.group(help=__doc__)
def main() -> None:
    """Train, gather, report."""


@main.command()
@click.option("--trunk", type=click.Choice(KINDS), default="bf16", show_default=True)
@click.option("--points", callback=numbers, default="500,1500,3000", show_default=True)
@click.option("--orders", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--schedule", type=click.IntRange(0), default=0,
              help="Steps of the learning rate.  [default: the last point and its branch]")  # fmt: skip
def branches(trunk, points, orders, seed, schedule, preset, kinds, steps, **rest) -> None:
    """Train a trunk and branches from its points."""
    plan = Plan(preset, trunk, kinds, points, steps, orders, seed, 0, schedule)
    train([plan], **rest)


@main.command()
@click.option("--seeds", type=click.IntRange(1), default=8, show_default=True)
@click.option("--first-seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--evaluate-every", type=click.IntRange(1), default=1000, show_default=True)
def pairs(seeds, first_seed, evaluate_every, preset, kinds, steps, **rest) -> None:
    """Train pairs from the initial weights."""
    plans = [
        Plan(preset, "none", kinds, [0], steps, 1, seed, evaluate_every)
        for seed in range(first_seed, first_seed + seeds)
    ]
    train(plans, **rest)


for command, options in (
    (branches, shared("bf16,fp8,disturbed", 500, 1.0)),
    (pairs, shared("bf16,fp8", 3000, 4.2)),
):
    for option in reversed(options):
        option(command)


@main.command("gather")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--to", "path", required=True, type=click.Path(path_type=Path, dir_okay=False))
def gather_files(files: Sequence[Path], path: Path) -> None:
    """Merge the runs of FILES, and of directories that `sonicmoe train --compare` left, into one
    compressed file.
    """
    runs = gather(files, path)
    click.echo(f"{path}: {len(runs)} runs, {path.stat().st_size / 1024:.0f} KiB")


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--plot", type=click.Path(path_type=Path, file_okay=False), help="Directory of pictures."
)
def report(path: Path, plot: Path | None) -> None:
    """Print the gaps of the runs in PATH, in per cent."""
    runs = read_runs(path)
    for line in tables(runs):
        click.echo(line)
    for picture in draw(runs, plot) if plot else ():
        click.echo(f"plot: {picture}")


if __name__ == "__main__":
    main()
