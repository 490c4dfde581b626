"""`sonicmoe verify`: any experts of PyTorch against fp64, a table of passes and failures."""

from __future__ import annotations

import atexit
import dataclasses
import json
import sys
import textwrap
from contextlib import redirect_stdout
from typing import Any

import click
from rich.table import Table

from ..diagnostics.cases import VERIFIED, CaseSizes
from ..engine.capabilities import REFERENCE
from .options import activation_options, load_framework
from .refusals import OneLineCommand
from .screen import Activity, print_table

WIDTH = 62  # of a detail, so that a row has 100 columns; --json has all of it
LAYOUTS = ("interleaved", "halves", "fused", "fused_interleaved")


def size_options(defaults: CaseSizes) -> Any:
    """The options of a generated case."""

    def decorate(command: Any) -> Any:
        for size in reversed(dataclasses.fields(CaseSizes)):
            # A decorator that is applied first stands last in the help, hence `reversed`.
            default = getattr(defaults, size.name)
            option = click.option(
                f"--{size.name}", type=click.IntRange(1), default=default, show_default=True
            )
            command = option(command)
        return command

    return decorate


@click.command(cls=OneLineCommand)
@click.argument("name", metavar="MODULE:FUNCTION")
@click.option("--layout", type=click.Choice(LAYOUTS), default="halves", show_default=True,
              help="How w1 and w2 lie (docs/migrating.md).")  # fmt: skip
@activation_options
@click.option("--dtype", type=click.Choice(REFERENCE.dtypes), default="float32", show_default=True)
@click.option("--device", help="[default: the first GPU, else cpu]")
@click.option("--tolerance", type=float,
              help="Most relative error of an expert.  [default: by dtype]")  # fmt: skip
@click.option("--check", multiple=True, metavar="NAME",
              help="A row of the table; may be repeated.  [default: all]")  # fmt: skip
@size_options(VERIFIED)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(
    ctx: click.Context,
    name: str,
    layout: str,
    activation: str,
    parameters: tuple[tuple[str, float], ...],
    dtype: str,
    device: str | None,
    tolerance: float | None,
    check: tuple[str, ...],
    as_json: bool,
    **sizes: int,
) -> None:
    """Check any experts of PyTorch against fp64: numbers, routing, memory, repetition, ranks.

    MODULE:FUNCTION, or FILE.py:FUNCTION, is a callable (x, ids, probs, w1, w2) -> out, with x and
    out [T, H], ids and probs [T, K], and the stacked weights of E experts. Exit code 1 when a check
    failed.
    """
    load_framework("torch")
    # After `load_framework`: these imports bind the package to it.
    from ..diagnostics import verify as tool
    from ..diagnostics.experts_under_test import ExpertsUnderTest, load
    from ..routing.backends import find_device

    for asked in check:
        if asked not in tool.CHECKS:
            raise click.BadParameter(f"{asked!r}; needed: one of {list(tool.CHECKS)}", ctx)
    place = device or find_device()
    findings = []
    # stdout has the result alone, whatever the callable prints, also when this process ends.
    with redirect_stdout(sys.stderr), Activity("verify") as doing:
        given = layout, activation, dict(parameters), dtype, place, tolerance, CaseSizes(**sizes)
        subject = ExpertsUnderTest(load(name), *given)
        subject.case()  # refused here, parameters of the activation are no failed check
        for asked in check or tool.CHECKS:
            doing.begin(asked)
            findings.append(tool.verify(asked, subject))
    atexit.register(lambda: setattr(sys, "stdout", sys.stderr))
    failed = sum(finding.state == tool.FAILED for finding in findings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("check", "result", "", box=None, padding=(0, 2, 0, 0))
        for row in findings:
            style = "red" if row.state == tool.FAILED else None
            line = textwrap.shorten(row.detail, WIDTH, placeholder=" ...")
            table.add_row(row.check, row.state, line, style=style)
        print_table(table)
        click.echo(f"{failed} of {len(findings)} checks failed")
    ctx.exit(1 if failed else 0)
