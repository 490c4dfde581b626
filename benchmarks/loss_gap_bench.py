#!/usr/bin/env python3
"""What FP8 costs at scale: seeds of `sonicmoe train --compare` on the GPUs of a host, the signed loss
gap with its spread, and the error of FP8 on the tensors that the runs end with.

    python benchmarks/loss_gap_bench.py --run 420m:0-2 --minutes 30 --out runs/scale        # one GPU
    python benchmarks/loss_gap_bench.py --run 1b:0 --run 420m:0-6 --minutes 25 --out runs/scale    # four
    python benchmarks/loss_gap_bench.py --run tiny:0-1 --device cpu --out runs/tiny         # is the program right?

Every seed is a process of its own that trains both precisions in turns on the same batches, and
writes no checkpoint. `--per-gpu` processes share a GPU, so that one computes while the host
launches the next step of another; `1b` gets a GPU for itself. After `--minutes` the seeds that still
run are stopped. They are listed with the step that they reached, and are no part of the mean. With
the tables of tensors, which have `--table-minutes`, a command of the default `--minutes` has its
whole report after 600 seconds. The exit code is 0 when every seed finished and every table was made,
else 1.

How long it takes. The model `420m` took 0.0812 + 0.0911 s for a step in both precisions, 16,384
tokens, on one H200 (docs/lab/loss_at_scale.md): 517 s for 3,000. Of these the optimizer moves 44 bytes per
parameter and precision at 4.24 TB/s: 2 x 4.4 ms. The rest is taken to grow with the products,
6 x (K 3HI + 4HH + SH) per token and layer, which is 1.64 GFLOP there.

    420m    421 M parameters, 16 experts: 517 s for 3,000 steps
    1b      1.10 B parameters, 128 experts, 8,192 tokens a step: 171 s for 3,000 steps by the products,
            620 s measured on an H100.
            Weights, gradients and two moments in fp32 are 16 bytes per parameter and precision: 33 GiB.

Starting, compiling and drawing the initial weights take one to two minutes more. `--help` has the
options, and the first lines of the output have these figures for what was asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_queue import HOST, GpuQueue, Outcome, StopRequest, Task, child_command, gpus
from loss_gap_presets import PRESETS, Preset, plan_line, with_steps
from start_together import with_package

from ernie_compat.gap_runs import GapRun, GapSummary, gap_curve, read_run, summarise
from ernie_compat.lossgap import percent, print_gaps, to_json, verdict
from ernie_compat.metrics import read_metrics
from ernie_compat.train_command import train
from ernie_compat.trainer import CAPTURED_PATTERN, METRICS_NAME
from sonicmoe.diagnostics.step_dump import StepSettings, load_dump, save_dump
from sonicmoe.errors import SonicMoEError
from sonicmoe.quant.recipes import DEEPSEEK_V3

# Of a captured call: the tables of more would take longer than what is left of 600 s.
SAMPLED_ROWS = 8192
STATUS_EVERY_S = 30.0


@dataclass(frozen=True)
class Seed:
    """One run of a preset: its seed and its directory."""

    preset: str
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.preset} seed {self.seed}"


class PresetSeeds(click.ParamType):
    """`PRESET:SEEDS`, the seeds as `0-7`, `0,2,5` or `3`."""

    name = "preset:seeds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        """The preset's name and its seeds."""
        preset, _, seeds = str(value).partition(":")
        if preset not in PRESETS:
            self.fail(f"{preset!r} is none of the presets {', '.join(PRESETS)}", param, ctx)
        found: list[int] = []
        try:
            for part in seeds.split(","):
                first, _, last = part.partition("-")
                found += range(int(first), int(last or first) + 1)
        except ValueError:
            self.fail(f"{seeds!r} are no seeds; needed: 0-7, 0,2,5 or 3", param, ctx)
        if not found or len(set(found)) < len(found):
            self.fail(f"{seeds!r} has no seed, or one of them twice", param, ctx)
        return preset, tuple(found)


def train_arguments(
    preset: Preset, seed: Seed, framework: str, engine: str, data: Sequence[str]
) -> tuple[str, ...]:
    """Of `sonicmoe` for one seed."""
    last = preset.model.moe_layers[-1]
    words = ["train", "--framework", framework, "--engine", engine, "--precision", "fp8"]
    words += ["--compare", "--no-checkpoint", "--capture", str(last), "--out", str(seed.out)]
    left_out = ("checkpoint", "checkpoint_every")
    for option in train.params:
        for config in (preset.model, replace(preset.train, seed=seed.seed)):
            # An option has the name of the field that it sets.
            if hasattr(config, str(option.name)) and option.name not in left_out:
                words += [option.opts[0], str(getattr(config, str(option.name)))]
    for path in data:
        words += ["--data", path]
    return tuple(words)


class Progress:
    """A line about the running seeds every `STATUS_EVERY_S` seconds."""

    def __init__(self, queue: GpuQueue, seeds: dict[str, Seed], started: float) -> None:
        """`started`: of `time.monotonic`."""
        self._queue, self._seeds, self._started = queue, seeds, started
        self._said = started

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._said < STATUS_EVERY_S:
            return
        self._said = now
        running = [self._seeds[task.name] for task in self._queue.running]
        steps = ", ".join(f"{seed.name} at step {steps_done(seed)}" for seed in running)
        click.echo(f"{now - self._started:.0f} s: {steps}")


def steps_done(seed: Seed) -> int:
    """Lines of its metrics so far."""
    try:
        return (seed.out / METRICS_NAME).read_bytes().count(b"\n")
    except OSError:
        return 0


def gap_so_far(seed: Seed) -> float | None:
    """The signed gap over the last quarter of the steps that an unfinished run did."""
    try:
        records = read_metrics(seed.out / METRICS_NAME)
        pairs = [(r.loss, r.full_precision_loss) for r in records]
        whole = [(loss, reference) for loss, reference in pairs if reference]
        return gap_curve(*zip(*whole, strict=True))[2] if whole else None
    except SonicMoEError:
        return None


def unfinished_lines(
    outcomes: Sequence[Outcome], seeds: dict[str, Seed], presets: dict[str, Preset]
) -> list[str]:
    """What became of every seed that did not finish, with the last words of those that failed."""
    lines = []
    for outcome in outcomes:
        if outcome.state == "finished":
            continue
        seed = seeds[outcome.task.name]
        steps = presets[seed.preset].train.steps
        said = f"{seed.name}: {outcome.state} at step {steps_done(seed)} of {steps}"
        gap = gap_so_far(seed)
        lines.append(said + ("" if gap is None else f", signed gap so far {percent(gap)} %"))
        if outcome.state == "failed":
            words = outcome.task.log.read_text(errors="replace").splitlines()[-5:]
            lines += [f"    {word}" for word in words]
    return lines


def goal_line(summary: GapSummary, goal: float) -> str:
    """Whether the interval of the signed gap lies within +-`goal` percent."""
    low, high = 100 * summary.signed_gap.low, 100 * summary.signed_gap.high
    if summary.runs < 2:
        return f"{summary.kind}: one seed has no interval"
    inside = -goal <= low and high <= goal
    words = "inside" if inside else "not inside"
    return (
        f"{summary.kind}: the interval [{low:.3f}, {high:.3f}] % of the signed gap over "
        f"{summary.runs} seeds is {words} +-{goal:g} %"
    )


def sampled(seed: Seed, steps: int) -> list[Path]:
    """The captured calls of a run, cut to their first tokens, named after the run."""
    files = []
    for path in sorted(seed.out.glob(CAPTURED_PATTERN)):
        step = load_dump(path)
        tokens = SAMPLED_ROWS // step.indices.shape[1]
        few = {name: getattr(step, name)[:tokens] for name in ("x", "dout", "indices", "probs")}
        layer = path.stem.rpartition("-")[2].replace("layer", "layer ")
        name = f"{seed.name}, step {steps}, {layer}"
        files.append(seed.out.with_name(f"{seed.out.name}-{path.stem}-sample.npz"))
        # The caller's names are of all the tokens.
        save_dump(files[-1], replace(step, name=name, caller=None, **few))
    return files


def numerics(files: Sequence[Path], framework: str) -> list[str]:
    """The arguments of `numerics_report.py`: the default recipe beside DeepSeek-V3's."""
    words = [
        "--framework",
        framework,
        "--recipe",
        str(StepSettings().recipe),
        "--recipe",
        DEEPSEEK_V3.name,
    ]
    words += ["--z", "int8", "--z", "e4m3"]
    return words + [word for path in files for word in ("--captured", str(path))]


def places(device: str, environment: dict[str, str]) -> list[str]:
    """The devices to run on.

    Raises:
        click.ClickException: GPUs are asked for, and there is none.
    """
    if device == "cpu":
        return [HOST]
    found = gpus(environment)
    if not found:
        raise click.ClickException(
            "there is no NVIDIA GPU here; --device cpu runs on the host, which is for --run tiny"
        )
    return found


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
@click.option("--run", "runs", type=PresetSeeds(), multiple=True, default=["420m:0-7"], show_default=True,
              help=f"Preset ({', '.join(PRESETS)}) and seeds; may be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Of every seed, in place of the preset's.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--per-gpu", type=click.IntRange(1), default=2, show_default=True,
              help="Processes that share a GPU (the host, with --device cpu).")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=7.5, show_default=True,
              help="Until seeds that still run are stopped.")  # fmt: skip
@click.option("--table-minutes", type=click.FloatRange(0, min_open=True), default=1.8,
              show_default=True, help="Until tables of tensors that are still computed are stopped.")  # fmt: skip
@click.option("--framework", type=click.Choice(["torch", "paddle"]), default="torch",
              show_default=True)  # fmt: skip
@click.option(
    "--engine", help="Of the FP8 experts.  [default: hopper; with --device cpu reference]"
)
@click.option("--goal", type=float, default=0.15, show_default=True,
              help="Percent that the interval of the signed gap should stay within.")  # fmt: skip
@click.option("--data", multiple=True, help="Text, as of `sonicmoe train`; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True,
              help="A directory for each seed, its log beside it.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False),
              help="Write all figures.")  # fmt: skip
def main(
    runs: Sequence[tuple[str, tuple[int, ...]]],
    steps: int | None,
    device: str,
    per_gpu: int,
    minutes: float,
    table_minutes: float,
    framework: str,
    engine: str | None,
    goal: float,
    data: Sequence[str],
    out: Path,
    json_file: Path | None,
) -> None:
    """Train, wait, report, as the head of this file says."""
    started = time.monotonic()
    environment = with_package(os.environ)
    devices = places(device, environment)
    names = [name for name, _ in runs]
    if len(set(names)) < len(names):
        raise click.ClickException("--run names a preset twice; needed: all its seeds in one")
    presets = {name: with_steps(PRESETS[name], steps) for name in names}
    seeds = [Seed(name, n, out / f"{name}-seed{n}") for name, many in runs for n in many]
    for seed in seeds:
        if seed.out.exists():
            raise click.ClickException(f"{seed.out} is there; give another --out, or remove it")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    for name, many in runs:
        click.echo(plan_line(name, presets[name], many))
    # Each process computes with its share of the cores.
    at_once = min(len(seeds), len(devices) * per_gpu)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
    chosen = engine or ("hopper" if device == "cuda" else "reference")
    tasks = [
        Task(
            seed.name,
            train_arguments(presets[seed.preset], seed, framework, chosen, data),
            seed.out.with_suffix(".log"),
            presets[seed.preset].alone,
        )
        for seed in seeds
    ]
    by_name = {seed.name: seed for seed in seeds}
    queue = GpuQueue(tasks, devices, per_gpu, environment, click.echo)
    with StopRequest() as stop:
        outcomes = queue.run(
            started + 60 * minutes, lambda: stop.asked, Progress(queue, by_name, started)
        )
    environment["CUDA_VISIBLE_DEVICES"] = devices[0]
    environment["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
    whole = report(
        outcomes, by_name, presets, framework, environment, goal, 60 * table_minutes, json_file
    )
    click.echo(f"{time.monotonic() - started:.0f} s in all")
    sys.exit(0 if whole else 1)


def report(
    outcomes: Sequence[Outcome],
    seeds: dict[str, Seed],
    presets: dict[str, Preset],
    framework: str,
    environment: dict[str, str],
    goal: float,
    table_seconds: float,
    json_file: Path | None,
) -> bool:
    """Print everything, and write it where asked; whether nothing is missing."""
    finished = [seeds[one.task.name] for one in outcomes if one.state == "finished"]
    missing = unfinished_lines(outcomes, seeds, presets)
    gaps = gaps_of(finished, missing)
    figures: dict[str, Any] = {"goal_percent": goal, "unfinished": missing}
    click.echo(f"\n{len(finished)} of {len(outcomes)} seeds finished")
    for line in missing:
        click.echo(line)
    if gaps:
        summaries = summarise(gaps)
        figures |= to_json(gaps, summaries)
        print_gaps(gaps, summaries)
        for summary in summaries:
            click.echo(verdict(summary))
            click.echo(goal_line(summary, goal))
    # Before the tables of the tensors, which the end of the machine's time may cut off.
    write_json(figures, json_file)
    # One run of each preset, because the tables must be made in what is left of the time.
    firsts = {seed.preset: seed for seed in reversed(finished)}
    tables = tensor_tables(list(firsts.values()), framework, environment, table_seconds)
    for name in presets:
        table = tables.get(firsts[name].name) if name in firsts else None
        click.echo(f"\n{name}, tensors of the last step: {table or 'none were measured'}")
    write_json(figures | {"numerics": tables}, json_file)
    return not missing and len(tables) == len(presets)


def gaps_of(finished: Sequence[Seed], missing: list[str]) -> list[GapRun]:
    """The gaps of the runs; one that has none joins the lines of what is missing."""
    gaps = []
    for seed in finished:
        try:
            gaps.append(read_run(seed.out))
        except SonicMoEError as error:
            missing.append(f"{seed.name}: {error}")
    return gaps


def tensor_tables(
    seeds: Sequence[Seed], framework: str, environment: dict[str, str], seconds: float
) -> dict[str, str]:
    """What `numerics_report.py` prints of each run's captured calls, by the run's name. All are
    computed at once; one that fails, or takes longer than `seconds`, has none, and stderr tells.
    """
    children = {}
    for seed in seeds:
        try:
            files = sampled(seed, steps_done(seed))
        except (SonicMoEError, OSError) as error:
            click.echo(f"{seed.name}: its captured calls cannot be read: {error}", err=True)
            continue
        # Without a file the command would measure random numbers of its own.
        if not files:
            click.echo(f"{seed.name}: there are no captured calls in {seed.out}", err=True)
            continue
        children[seed.name] = subprocess.Popen(
            child_command("numerics_report", numerics(files, framework)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
    deadline = time.monotonic() + seconds
    tables = {}
    for name, child in children.items():
        try:
            table = child.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
            if child.returncode == 0:
                tables[name] = table
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            click.echo(f"{name}: numerics_report.py was stopped after {seconds:.0f} s", err=True)
    return tables


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    """Where it was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
