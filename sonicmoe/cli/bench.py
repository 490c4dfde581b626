"""`sonicmoe bench`: time, rate and memory of the engines on this machine; sweeps and the cost model
fitted to them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..bench.shapes import REFERENCE, SHAPES, SMALL, Shape
from ..enums import EngineName, FlushMode
from ..errors import ConfigError, expect
from ..frameworks import AUTO
from ..host import require_memory
from ..plotting import require_matplotlib
from .framework import CHOICES, load_framework
from .numerics import print_table
from .refusals import Location, OneLineCommand, Seconds
from .screen import Activity

if TYPE_CHECKING:
    from ..bench.figures import Result
    from ..bench.runner import Effort
    from ..bench.workload import Variant

# click names a parameter by its letter in lower case; the shape has words.
SIZE_FIELDS = {"h": "hidden", "i": "intermediate", "e": "experts", "k": "topk"}
ENGINES = [engine.value for engine in EngineName if engine is not EngineName.AUTO]
# On a host a round takes seconds, and nobody decides by its time.
ROUNDS = {"cuda": 20, "cpu": 3}
# A GPU reaches its power limit after about a second of work without a pause.
SUSTAINED_S = {"cuda": 2.5, "cpu": 0.0}
MOST = 2**31 - 1  # of a size, which is a 32-bit number in the kernels
_BF16 = 2  # bytes


def _size(letter: str, text: str) -> Any:
    return click.option(f"--{letter}", letter.lower(), type=click.IntRange(1, MOST), help=text)


@click.command(cls=OneLineCommand)
@click.option("--shape", "names", multiple=True, type=click.Choice(list(SHAPES)), metavar="NAME",
              help="A named shape (--list); may be repeated.  [default: reference on a GPU, small without one]")  # fmt: skip
@click.option(
    "--T",
    "tokens",
    type=click.IntRange(1, MOST),
    multiple=True,
    help="Tokens; may be repeated, for a curve.",
)
@_size("H", "Hidden size.")
@_size("I", "Intermediate size of an expert.")
@_size("E", "Local experts.")
@_size("K", "Experts per token.")
@click.option("--engine", "engines", multiple=True, metavar="NAME[:MODE]",
              help=f"{', '.join(ENGINES)}; MODE off, perf, mem; may be repeated, the first is the baseline.  "
              "[default: every GPU engine, else reference]")  # fmt: skip
@click.option("--flush", "flushes", multiple=True, type=click.Choice(["auto", "step"]),
              help="Weight gradients: complete after every backward, straight in main_grad where the engine can (auto), or "
              "through accumulators of the node (step). May be repeated: every engine in each way.  [default: auto]")  # fmt: skip
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Timed runs per engine.  [default: 20, 3 without a GPU]",
)
@click.option(
    "--warmup", type=click.IntRange(1), default=2, show_default=True, help="Untimed runs before."
)
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True,
              help="Layers of a step in the steady state: so many forwards, then one backward() for all.")  # fmt: skip
@click.option("--sustained", type=Seconds(), metavar="SECONDS",
              help="Seconds of steps back to back per engine, for time, SM clock, power and joules per layer under steady load; "
              "0 leaves them out.  [default: 2.5; 0 without a GPU and in a sweep]")  # fmt: skip
@click.option(
    "--kernels",
    type=click.IntRange(0),
    default=12,
    show_default=True,
    help="Lines of the kernel breakdown.",
)
@click.option("--nvtx", is_flag=True, help="Also open an NVTX range per stage, for Nsight.")
@click.option(
    "--framework",
    type=click.Choice(CHOICES),
    default=AUTO,
    show_default=True,
    help="torch in any case: it measures with PyTorch's events and profiler.",
)
@click.option(
    "--plot",
    type=Location(file_okay=False),
    metavar="DIR",
    help="Draw pictures to DIR.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option("--list", "list_only", is_flag=True, help="List the named shapes, measure nothing.")
@click.option("--sweep", type=Location(dir_okay=False), metavar="FILE",
              help="Measure E x (H, I) x T*K into FILE (JSON lines), continuing what is there; then fit.")  # fmt: skip
@click.option(
    "--budget",
    type=Seconds(),
    metavar="SECONDS",
    help="Stop the sweep after SECONDS, to be continued.",
)
@click.option("--fit", type=Location(dir_okay=False, exists=True), metavar="FILE",
              help="Fit the cost model to a sweep; measures nothing, needs no GPU.")  # fmt: skip
def bench(
    names: tuple[str, ...],
    tokens: tuple[int, ...],
    engines: tuple[str, ...],
    flushes: tuple[str, ...],
    rounds: int | None,
    warmup: int,
    layers: int,
    sustained: float | None,
    kernels: int,
    nvtx: bool,
    framework: str,
    plot: Path | None,
    as_json: bool,
    markdown: bool,
    list_only: bool,
    sweep: Path | None,
    budget: float | None,
    fit: Path | None,
    **sizes: int | None,
) -> None:
    """Time forward, backward and step of the engines, side by side, with rates, memory and a kernel
    breakdown.

    Without a GPU it measures the reference engine and says so. Exit code 1 when no engine ran.
    """
    if list_only:
        list_shapes(as_json)
        return
    if plot is not None:
        # A measurement may take an hour. Where nothing can be drawn, that is said before it.
        require_matplotlib()
        plot.mkdir(parents=True, exist_ok=True)
    # Neither this nor the list needs a framework, so both answer at once.
    if fit is not None:
        report_fit(fit, plot, as_json, markdown)
        return
    if framework == "paddle":
        raise click.UsageError(
            "--framework paddle: bench measures with PyTorch's events and profiler; needed: torch"
        )
    load_framework("torch")
    if sweep is not None:
        run_sweep(sweep, engines, flushes, budget, rounds, sustained or 0.0, as_json)
        report_fit(sweep, plot, as_json, markdown)
        return
    # After `load_framework`: the modules that measure import it.
    from ..bench.runner import Effort, find_device

    device = find_device()
    kind = device.split(":")[0]
    effort = Effort(
        rounds=rounds or ROUNDS[kind],
        warmup=warmup,
        layers=layers,
        sustained_s=SUSTAINED_S[kind] if sustained is None else sustained,
        nvtx=nvtx,
    )
    shapes = chosen_shapes(names, tokens, sizes, device)
    results = measure_all(shapes, chosen_variants(engines, flushes, device), effort)
    report(results, draw(results, plot), kernels, as_json, markdown)
    # One engine that cannot run here is a line of the report; none at all is a failure.
    if all(result.refusal is not None for result in results):
        raise click.exceptions.Exit(1)


def chosen_shapes(
    names: Sequence[str], tokens: Sequence[int], sizes: dict[str, int | None], device: str
) -> list[Shape]:
    """Named shapes, and one per T of the sizes given; sizes not given are those of the default
    shape.
    """
    default = SMALL if device == "cpu" else REFERENCE
    given = {SIZE_FIELDS[name]: value for name, value in sizes.items() if value is not None}
    shapes = [SHAPES[name] for name in names]
    if tokens or given:
        shapes += [
            Shape(**{**vars(default), **given, "tokens": count})
            for count in tokens or (default.tokens,)
        ]
    shapes = shapes or [default]
    # A GPU that runs out of memory says so. A host that does is slowed down by its disk, or the
    # system ends some process of its own choice.
    if device == "cpu":
        for shape in shapes:
            # Tokens in and out, and the weights, which every engine holds at least once.
            numbers = 2 * shape.tokens * shape.hidden
            numbers += 3 * shape.experts * shape.intermediate * shape.hidden
            require_memory(_BF16 * numbers, f"the shape {shape}")
    return shapes


def chosen_variants(engines: Sequence[str], flushes: Sequence[str], device: str) -> list[Variant]:
    """The engines named, or those of this machine, each with its gradients on every way asked for."""
    from ..bench.workload import Variant, available_variants

    variants = [Variant.parse(text) for text in engines] or available_variants(device)
    ways = [FlushMode(name) for name in dict.fromkeys(flushes)] or [FlushMode.AUTO]
    return [replace(variant, flush=way) for variant in variants for way in ways]


def measure_all(
    shapes: Sequence[Shape], variants: Sequence[Variant], effort: Effort
) -> list[Result]:
    """The results of every shape, one behind the other."""
    from ..bench.runner import measure

    with Activity("bench") as doing:
        return [
            result for shape in shapes for result in measure(shape, variants, effort, doing.begin)
        ]


def report(
    results: list[Result], pictures: list[str], kernels: int, as_json: bool, markdown: bool
) -> None:
    """One JSON object; or the machine, the tables of each shape, stages and kernels per engine."""
    from ..bench import tables
    from ..bench.runner import machine

    facts = machine()
    if as_json:
        listed = [result.to_json() for result in results]
        data = {"machine": facts, "results": listed, "plots": pictures}
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    device = ", ".join(filter(None, (facts["device"], facts["architecture"])))
    click.echo(f"{device}, {facts['date']}: {versions}")
    # A table compares what was measured on the same shape; what was not measured has no table.
    for shape in dict.fromkeys(result.shape for result in results):
        own = [result for result in results if result.shape == shape]
        if any(result.pair_us for result in own):
            print_table(tables.time_table(own), markdown)
            print_table(tables.rate_table(own), markdown)
        if any(result.sustained for result in own):
            print_table(tables.sustained_table(own), markdown)
    for result in results:
        if result.stages and kernels:
            print_table(tables.stage_table(result), markdown)
            print_table(tables.kernel_table(result, kernels), markdown)
    for line in [*tables.notes(results), *(f"plot: {path}" for path in pictures)]:
        click.echo(line)


def draw(results: list[Result], directory: Path | None) -> list[str]:
    """Paths of the pictures drawn."""
    if directory is None:
        return []
    from ..bench.plots import plot_all

    return [str(path) for path in plot_all(results, directory)]


def list_shapes(as_json: bool) -> None:
    """Print the shapes that have a name, and their sizes."""
    if as_json:
        click.echo(json.dumps({name: vars(shape) for name, shape in SHAPES.items()}, indent=2))
        return
    for name, shape in SHAPES.items():
        click.echo(f"{name:<26}{shape}")


def run_sweep(
    path: Path,
    engines: Sequence[str],
    flushes: Sequence[str],
    budget: float | None,
    rounds: int | None,
    sustained_s: float,
    as_json: bool,
) -> None:
    """Measure the points that `path` lacks."""
    from ..bench.runner import find_device
    from ..bench.sweep import STEPS, grid, sweep

    device = find_device()
    expect(len(engines) <= 1, ConfigError, f"--sweep takes one --engine, got {list(engines)}")
    expect(len(flushes) <= 1, ConfigError, f"--sweep takes one --flush, got {list(flushes)}")
    # The last one is the fastest engine of this machine.
    variant = chosen_variants(engines, flushes, device)[-1]
    with Activity("sweep") as doing:
        done, left = sweep(
            path,
            grid(device),
            variant,
            budget_s=budget,
            rounds=rounds or STEPS,
            sustained_s=sustained_s,
            notify=doing.begin,
        )
    click.echo(
        f"{path}: {done} points measured now, {left} left"
        + (" (run again to continue)" if left else ""),
        err=as_json,
    )


def report_fit(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    """Fit and print the cost model of every engine in a sweep."""
    from ..bench.cost_model import FitError, fit_model
    from ..bench.plots import plot_model
    from ..bench.points import read_points
    from ..bench.tables import residual_table, term_table

    groups: dict[str, list[Any]] = {}
    for point in read_points(path):
        # One file may hold sweeps of several engines and devices; each gets a model of its own.
        groups.setdefault(point.group, []).append(point)
    data: dict[str, Any] = {}
    for group, points in groups.items():
        try:
            model = fit_model(points)
        # Too few points of one engine must not hide the model of another.
        except FitError as error:
            data[group] = {"points": len(points), "error": str(error)}
            continue
        pictures = [] if plot is None else [str(p) for p in plot_model(model, points, plot)]
        data[group] = {**model.to_json(), "plots": pictures}
        if not as_json:
            dates = "–".join(dict.fromkeys(f(point.date for point in points) for f in (min, max)))
            click.echo("\n".join([f"{group}, {dates}: {len(points)} points", *model.lines()]))
            print_table(term_table(model, points), markdown)
            print_table(residual_table(model, points), markdown)
            click.echo("".join(f"plot: {picture}\n" for picture in pictures), nl=False)
    if as_json:
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        for group, entry in data.items():
            if "error" in entry:
                click.echo(f"{group}: {entry['error']}")
