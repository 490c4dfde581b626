"""`sonicmoe bisect`: run a dumped step stage by stage and name the first wrong stage, expert, row
and token.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..diagnostics.step_dump import StepSettings, load_dump
from ..enums import EngineName
from .options import framework_option, load_framework
from .refusals import Location, OneLineCommand
from .screen import Activity, print_table

ENGINES = [engine.value for engine in EngineName if engine is not EngineName.AUTO]


@click.command(cls=OneLineCommand)
@click.argument("dump", type=Location())
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    help="Engine to examine.  [default: the one that ran the step]",
)
@click.option("--precision", type=click.Choice(["as-dumped", "fp8", "bf16"]), default="as-dumped", show_default=True,
              help="Run it quantised, or not, whatever it was.")  # fmt: skip
@framework_option("Runs the engines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bisect(
    ctx: click.Context,
    dump: Path,
    engine: str | None,
    precision: str,
    framework: str,
    as_json: bool,
) -> None:
    """Run the step in DUMP stage by stage and name the first wrong stage, expert, row and token.

    DUMP is what `dump(path)` of a node or a `MoE`, `sonicmoe.diagnostics.capture.dump` or
    `detect_nonfinite(dump_dir=...)` wrote, or what `sonicmoe train --capture` did. Bad weights are
    named by parameter as the model has it. Exit code 1 when a stage is wrong.
    """
    # Read first: a file that is no dump is refused before a framework is imported.
    step = load_dump(dump)
    if precision != "as-dumped":
        # A step that ran unquantised has no recipe of its own, so it takes the default one.
        quantised = step.settings.recipe or StepSettings().recipe
        step = step.but(recipe=None if precision == "bf16" else quantised)
    load_framework(framework)
    # After `load_framework`: this import binds the package to a framework.
    from ..diagnostics import bisect as tool
    from ..diagnostics.bisect_report import stage_table, verdict
    from ..routing.backends import find_device

    with Activity("bisect"):
        report = tool.bisect(step, engine or step.settings.engine, find_device())
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(verdict(report)))
        print_table(stage_table(report))
    ctx.exit(0 if report.healthy else 1)
