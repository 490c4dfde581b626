"""`sonicmoe bench`: time, rate, energy and memory of the engines on this machine; sweeps and the
cost model fitted to them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..bench.models import MEASURED, model_shape
from ..bench.shapes import MOST, REFERENCE, SHAPES, SMALL, Shape
from ..enums import EngineName
from ..errors import ConfigError, ShapeError, expect
from ..host import require_memory
from .options import load_framework
from .refusals import Location, OneLineCommand, Seconds, refuse_beside
from .screen import Activity, print_table

if TYPE_CHECKING:
    from ..bench.figures import Result
    from ..bench.workload import Variant

ENGINES = [engine.value for engine in EngineName if engine is not EngineName.AUTO]
# A GPU reaches its power limit after about a second of work without a pause.
SUSTAINED_S = {"cuda": 2.5, "cpu": 0.0}
MOST_FLOP = (
    1e11  # of a shape on a CPU: ten seconds of the reference engine for each of some thirty calls
)
_BF16 = 2  # bytes


def _size(letter: str, field: str, text: str, **more: Any) -> Any:
    return click.option(f"--{letter}", field, type=click.IntRange(1, MOST), help=text, **more)


@click.command(cls=OneLineCommand)
@click.option("--shape", "names", multiple=True, type=click.Choice(list(SHAPES)), metavar="NAME",
              help="A named shape (--list); may be repeated.  [default: reference on a GPU, small without one]")  # fmt: skip
@_size("T", "tokens", "Tokens; may be repeated, for a curve.", multiple=True)
@_size("H", "hidden", "Hidden size.")
@_size("I", "intermediate", "Intermediate size of an expert.")
@_size("E", "experts", "Local experts.")
@_size("K", "topk", "Experts per token.")
@click.option("--model", metavar="PATH_OR_NAME",
              help="Answer for the experts of a model: the path of its config.json, or a name (--list): stock compiled, BF16 and FP8, "
              "and which to take. Without a GPU: the estimate of the cost model.")  # fmt: skip
@click.option("--tokens", "of_call", type=click.IntRange(1, MOST),
              help="Tokens of a call on this GPU, for --model, or for the same answer about the sizes --H --I --E --K.  "
              "[default: as the model was measured]")  # fmt: skip
@click.option("--engine", "engines", multiple=True, metavar="NAME[:MODE]",
              help=f"{', '.join(ENGINES)}; MODE off, perf, mem; may be repeated, the first is the baseline.  "
              "[default: every GPU engine, else reference]")  # fmt: skip
@click.option("--sustained", type=Seconds(), metavar="SECONDS",
              help="Seconds of steps back to back per engine, for time, SM clock, power and joules per layer under steady load; "
              "0 leaves them out.  [default: 2.5; 0 without a GPU]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--list", "list_only", is_flag=True, help="List the named shapes, measure nothing.")
@click.option("--sweep", type=Location(dir_okay=False), metavar="FILE",
              help="Measure E x (H, I) x T*K into FILE (JSON lines), continuing what is there; then fit.")  # fmt: skip
@click.option("--fit", type=Location(dir_okay=False, exists=True), metavar="FILE",
              help="Fit the cost model to a sweep, and predict the time of the shapes given; measures nothing, needs no GPU.")  # fmt: skip
@click.option(
    "--plot",
    type=Location(file_okay=False),
    metavar="DIR",
    help="Draw the cost model of --sweep or --fit to DIR.",
)
def bench(
    names: tuple[str, ...],
    tokens: tuple[int, ...],
    model: str | None,
    of_call: int | None,
    engines: tuple[str, ...],
    sustained: float | None,
    as_json: bool,
    list_only: bool,
    sweep: Path | None,
    fit: Path | None,
    plot: Path | None,
    **sizes: int | None,
) -> None:
    """Time forward, backward and step of the engines, side by side, with rates, energy, memory, and
    a breakdown by stage and kernel.

    Measures with PyTorch's events and profiler. Without a GPU it times the reference engine and
    says so. Exit code 1 when no engine ran.
    """
    if list_only:
        refuse_beside("--list", ("list_only",))
        click.echo("\n".join(f"{name:<26}{shape}" for name, shape in SHAPES.items()))
        models = ", ".join(dict.fromkeys(each.model for each in MEASURED))
        click.echo(f"names for --model: {models}")
        return
    if model is not None or of_call is not None:
        allowed = ("model", "of_call", "as_json", *(() if model is not None else sizes))
        refuse_beside("--model" if model is not None else "--tokens", allowed)
        answer(asked_shape(model, of_call, sizes), as_json)
        return
    if plot is not None:
        expect(bool(sweep or fit), ConfigError, "--plot draws a cost model: --sweep or --fit")
        from ..bench.plots import require_matplotlib

        # A sweep takes minutes. Where nothing can be drawn, that is said before it.
        require_matplotlib()
        plot.mkdir(parents=True, exist_ok=True)
    # Neither this nor the list needs a framework, so both answer at once.
    if fit is not None:
        refuse_beside("--fit", ("fit", "plot", "as_json", "names", "tokens", *sizes))
        asked = bool(names or tokens or any(sizes.values()))
        report_fit(fit, plot, as_json, chosen_shapes(names, tokens, sizes, "cuda") if asked else ())
        return
    if sweep is not None:
        refuse_beside("--sweep", ("sweep", "plot", "as_json", "engines"))
    load_framework("torch")
    # After `load_framework`: the modules that measure import it.
    from ..bench.runner import measure
    from ..bench.workload import Variant, available_variants
    from ..routing.backends import find_device

    device = find_device()
    variants = [Variant.parse(text) for text in engines] or available_variants(device)
    if sweep is not None:
        expect(len(engines) <= 1, ConfigError, f"--sweep takes one --engine, got {list(engines)}")
        # The last one is the fastest engine of this machine.
        run_sweep(sweep, variants[-1], as_json)
        report_fit(sweep, plot, as_json)
        return
    shapes = chosen_shapes(names, tokens, sizes, device)
    if sustained is None:
        sustained = SUSTAINED_S[device.split(":")[0]]
    results = []
    with Activity("bench") as doing:
        for shape in shapes:
            doing.begin(str(shape))
            results += measure(shape, variants, sustained)
    report(results, as_json)
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
    given = {field: value for field, value in sizes.items() if value is not None}
    shapes = [SHAPES[name] for name in names]
    if tokens or given:
        sized = replace(default, **given)
        shapes += [replace(sized, tokens=count) for count in tokens or (default.tokens,)]
    shapes = shapes or [default]
    # A GPU that runs out of memory says so. A host that does is slowed down by its disk, or the
    # system ends some process of its own choice.
    if device == "cpu":
        for shape in shapes:
            # Tokens in and out, and the weights, which every engine holds at least once.
            numbers = 2 * shape.tokens * shape.hidden
            numbers += 3 * shape.experts * shape.intermediate * shape.hidden
            require_memory(_BF16 * numbers, f"the shape {shape}")
            # Or it would take hours, in which nothing is learnt about a GPU.
            words = (
                f"the shape {shape} has {shape.flop:.1g} operations; needed without a GPU: at most"
            )
            remedy = "--model, or these sizes with --tokens in place of --T, estimate a GPU's time"
            expect(shape.flop <= MOST_FLOP, ShapeError, f"{words} {MOST_FLOP:g}; {remedy}")
    return shapes


def asked_shape(model: str | None, tokens: int | None, sizes: dict[str, int | None]) -> Shape:
    """The layer to answer for: of a model, or of sizes that are all given."""
    if model is not None:
        shape = model_shape(model)
        return shape if tokens is None else replace(shape, tokens=tokens)
    missing = [
        f"--{field[0].upper()}"
        for field in ("hidden", "intermediate", "experts")
        if not sizes[field]
    ]
    missing += [] if sizes["topk"] else ["--K"]
    words = f"--tokens asks for one layer, and {', '.join(missing)} is missing"
    expect(not missing, ConfigError, f"{words}; needed: --model, or --H --I --E --K")
    assert tokens is not None
    return Shape(tokens, **{field: size for field, size in sizes.items() if size is not None})


def answer(shape: Shape, as_json: bool) -> None:
    """What this GPU says of a layer, or the cost model where there is none; last one sentence."""
    load_framework("torch")
    from ..routing.backends import find_device

    device = find_device()
    if device == "cpu":
        from ..bench.estimate import estimate

        found = estimate(shape)
    else:
        from ..bench.contest import contest

        with Activity("bench") as doing:
            doing.begin(str(shape))
            found = contest(shape, device)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    print_table(found.table())
    click.echo("\n".join(found.lines))


def report(results: list[Result], as_json: bool) -> None:
    """One JSON object; or the machine, a table of each shape, stages and kernels per engine."""
    from ..bench import tables
    from ..bench.runner import machine

    facts = machine()
    if as_json:
        data = {"machine": facts, "results": [result.to_json() for result in results]}
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    device = ", ".join(filter(None, (facts["device"], facts["architecture"])))
    click.echo(f"{device}, {facts['date']}: {versions}")
    # A table compares what was measured on the same shape; what was not measured has no table.
    ran = [result for result in results if result.refusal is None]
    for shape in dict.fromkeys(result.shape for result in ran):
        own = [result for result in ran if result.shape == shape]
        print_table(tables.result_table(own))
    for result in ran:
        if result.stages:
            print_table(tables.stage_table(result))
            print_table(tables.kernel_table(result))
    for line in tables.notes(results):
        click.echo(line)


def run_sweep(path: Path, variant: Variant, as_json: bool) -> None:
    """Measure the points that `path` lacks."""
    from ..bench.sweep import grid, sweep
    from ..routing.backends import find_device

    with Activity("sweep") as doing:
        count = sweep(path, grid(find_device()), variant, doing.begin)
    click.echo(f"{path}: {count} points measured now", err=as_json)


def report_fit(path: Path, plot: Path | None, as_json: bool, shapes: Sequence[Shape] = ()) -> None:
    """Fit and print the cost model of every engine in a sweep, and what it predicts of `shapes`."""
    from ..bench.cost_model import fit_model
    from ..bench.plots import plot_model
    from ..bench.points import SweepError, read_points
    from ..bench.tables import term_table

    groups: dict[str, list[Any]] = {}
    for point in (point for point in read_points(path) if point.us is not None):
        # One file may hold sweeps of several engines and devices; each gets a model of its own.
        groups.setdefault(point.group, []).append(point)
    expect(bool(groups), SweepError, f"{path} has no point that was measured")
    data: dict[str, Any] = {}
    for group, points in groups.items():
        try:
            model = fit_model(points)
        # Too few points of one engine must not hide the model of another.
        except SweepError as error:
            data[group] = {"points": len(points), "error": str(error)}
            lines = [f"{group}: {error}"]
        else:
            picture = None if plot is None else str(plot_model(model, points, plot))
            predicted = dict(zip(map(str, shapes), model.predict(shapes).tolist(), strict=True))
            data[group] = {**asdict(model), "predicted_us": predicted, "plot": picture}
            date = max(point.date for point in points)
            lines = [f"{group}, {date}: {len(points)} points", *model.error_lines()]
            lines += model.prediction_lines(shapes, points)
            lines += [f"plot: {picture}"] if picture else []
            if not as_json:
                print_table(term_table(model, points))
        if not as_json:
            click.echo("\n".join(lines))
    if as_json:
        click.echo(json.dumps(data, indent=2, allow_nan=False))
