#!/usr/bin/env python3
"""The error of every FP8 recipe on every kind of data, against fp64, and whether it meets the bars.
docs/numerics.md defines every number and says what they decided.

    python benchmarks/numerics_report.py --data gaussian
    python benchmarks/numerics_report.py --captured runs/a/captured-step300-layer2.npz
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from numerics_baselines import BASELINES, Baseline, Dispatch
from numerics_cases import DATA_KINDS, LONE_OUTLIERS, load_case, make_case

from sonicmoe.cli.options import activation_options, framework_option, load_framework
from sonicmoe.cli.refusals import Location, OneLineCommand
from sonicmoe.cli.screen import Activity, print_table
from sonicmoe.cli.verify import size_options
from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.json_data import plain
from sonicmoe.diagnostics.step_dump import StepSettings
from sonicmoe.enums import ZCode
from sonicmoe.quant.recipes import RECIPES, Fp8Recipe, rows

if TYPE_CHECKING:
    from numerics_scores import Result, Score

    from sonicmoe.diagnostics.step_dump import StepDump


def _several(name: str, choices: Iterable[str], text: str, **more: Any) -> Any:
    words = f"{text}; may be repeated." + ("" if more else "  [default: all]")
    return click.option(name, multiple=True, type=click.Choice(list(choices)), help=words, **more)


@click.command(cls=OneLineCommand)
@_several("--recipe", RECIPES, "Blocks and scale format of the operands (sonicmoe/quant/recipes.py)")  # fmt: skip
@_several("--z", [code.value for code in ZCode], "Storage of the saved pre-activation z")
@_several("--data", [*DATA_KINDS, *LONE_OUTLIERS], "Kind of generated inputs, by default "
          f"{', '.join(DATA_KINDS)}, or none where --captured is given", default=())  # fmt: skip
@_several("--dispatch", [way.value for way in Dispatch], "How tokens reach the experts, and (-both) "
          "gradients of their output; behind all but bf16 the bar is DeepSeek-V3's way alone",
          default=[Dispatch.BF16.value], show_default=True)  # fmt: skip
@click.option("--against", type=click.Choice(list(BASELINES)), default="deepseek-v3", show_default=True,
              help="What every tensor is compared with: DeepSeek-V3's recipe with z in E4M3; "
              "DeepSeek-V3.1's, which has power-of-two scales, without slack, for recipes by name; or "
              "MXFP8 (one power-of-two scale per 32 of the contraction) with z in bf16, for recipes with "
              "power-of-two scales.")  # fmt: skip
@click.option("--captured", multiple=True, type=Location(), metavar="FILE",
              help="Inputs of a real call (.npz); may be repeated.")  # fmt: skip
@size_options(CaseSizes())
@activation_options
@click.option("--biases", type=click.FloatRange(0.0, 1e4), default=0.0, show_default=True,
              help="Standard deviation of both biases of generated experts, whose x W1 has 1; 0: no "
              "biases. The bars on Gaussian data are of experts without.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@framework_option("Runs the reference engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    recipe: tuple[str, ...], z: tuple[str, ...], data: tuple[str, ...], dispatch: tuple[str, ...],
    against: str, captured: tuple[Path, ...], activation: str, parameters: tuple[tuple[str, float], ...],
    biases: float, seed: int, framework: str, as_json: bool, **sizes: int,
) -> None:  # fmt: skip
    """Print the error of every FP8 recipe on every kind of data, against fp64, and whether it meets
    the bars.

    Per tensor: relative RMSE in %, overall and (in brackets) of the worst expert. docs/numerics.md
    defines every column.
    """
    # Tokens that arrive in FP8 have one scale per 128 columns.
    if BASELINES[against].recipe.x != rows(128) and set(dispatch) != {Dispatch.BF16.value}:
        raise click.UsageError(f"--against {against} compares tokens that arrive in bf16")
    recipes = [RECIPES[name] for name in RECIPES if not recipe or name in recipe]
    codes = [code for code in ZCode if not z or code.value in z]
    # CaseSizes that no layer has, and files that hold no call, are refused before the import.
    problem = CaseSizes(**sizes)
    layer = StepSettings.of(activation=activation, activation_parameters=dict(parameters))
    from_files = [load_case(path) for path in captured]
    load_framework(framework)
    with Activity("numerics") as doing:
        kinds = list(data) or ([] if from_files else list(DATA_KINDS))
        # A generator, so that one case at a time is in memory.
        cases = (make_case(kind, problem, seed, layer, biases) for kind in kinds)
        ways = [way for way in Dispatch if way.value in dispatch]
        bar = BASELINES[against]
        results = measure(from_files, cases, len(kinds), recipes, codes, ways, bar, doing)
    if as_json:
        click.echo(json.dumps(to_json(results), indent=2, allow_nan=False))
    else:
        report(results)


def measure(
    from_files: list[StepDump],
    generated: Iterator[StepDump],
    count: int,
    recipes: list[Fp8Recipe],
    codes: list[ZCode],
    ways: list[Dispatch],
    bar: Baseline,
    doing: Activity,
) -> list[Result]:
    """Every case under every recipe and code, behind every dispatch that the recipe can read;
    generated cases are made one at a time.
    """
    from numerics_scores import evaluate

    # A recipe that cannot read the tokens of a dispatch has no result, so the line counts
    # evaluations, whose number is known.
    doing.begin("measuring", total=(len(from_files) + count) * len(ways))
    results: list[Result] = []
    for case in (*from_files, *generated):
        for way in ways:
            for result in evaluate(case, recipes, codes, way, bar):
                doing.at(f"{case.name} {result.recipe.name}")
                results.append(result)
            doing.advance()
    return results


def report(results: list[Result]) -> None:
    """One table per kind of data, and the verdict over all data."""
    for data in dict.fromkeys(result.data for result in results):
        own = [result for result in results if result.data == data]
        print_table(error_table(data, own))
    for line in verdict_lines(results):
        click.echo(line)


def error_table(data: str, results: list[Result]) -> Table:
    """One row per recipe and code."""
    names = list(results[0].scores)
    errors = (f"{name} %" for name in names)
    table = Table("recipe", "z", *errors, "least cosine", "token p99 %", "bars", title=data)
    for result in results:
        # Of the experts too: a recipe may be good on average and bad for one of them.
        least = min(part.cosine for score in result.scores.values() for part in score.parts)
        cells = (percent(result.scores[name]) for name in names)
        tokens = " / ".join(f"{100 * result.scores[name].row_p99:.1f}" for name in ("out", "dx"))
        judged = (f"{least:.4f}", tokens, verdict(result))
        style = None if result.failures else "green"
        table.add_row(name_of(result), result.z.value, *cells, *judged, style=style)
    return table


def name_of(result: Result) -> str:
    """The recipe, and how tokens reached the experts if not in bf16: `iso128, fp8 dispatch`."""
    way = result.dispatch
    return result.recipe.name + ("" if way is Dispatch.BF16 else f", {way.value} dispatch")


def verdict(result: Result) -> str:
    """`met`, or the bars missed; what the sample is too small to tell stands in brackets."""
    words = "; ".join(result.failures) or "met"
    return words + (f" (unresolved: {'; '.join(result.unresolved)})" if result.unresolved else "")


def percent(score: Score) -> str:
    """`6.47 (6.50)`."""
    return f"{100 * score.overall.rmse:.2f} ({100 * score.worst_rmse:.2f})"


def verdict_lines(results: list[Result]) -> Iterator[str]:
    """Which combinations met every bar on all data measured."""
    pairs = dict.fromkeys((name_of(result), result.z.value) for result in results)
    # One failure on any data is enough: a recipe is chosen for all data that may come.
    missed = {(name_of(result), result.z.value) for result in results if result.failures}
    met = [f"{name} with {z} z" for name, z in pairs if (name, z) not in missed]
    yield "meets every bar on all of this data: " + (", ".join(met) or "nothing")


def to_json(results: list[Result]) -> dict[str, Any]:
    """Plain data; a number that is not finite becomes null."""
    listed = [
        {
            "data": result.data,
            "recipe": result.recipe.name,
            "z": result.z.value,
            "dispatch": result.dispatch.value,
            "failures": list(result.failures),
            "unresolved": list(result.unresolved),
            "tensors": {name: score_json(score) for name, score in result.scores.items()},
        }
        for result in results
    ]
    return {"results": listed}


def score_json(score: Score) -> dict[str, Any]:
    """Overall figures, the same of every expert that has tokens, and the row quantile."""
    # The first part is the whole tensor.
    overall, *experts = [vars(part) for part in score.parts]
    figures: dict[str, Any] = plain({**overall, "row_p99": score.row_p99, "experts": experts})
    return figures


if __name__ == "__main__":
    main()
