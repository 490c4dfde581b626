#!/usr/bin/env python3
"""Any experts of PyTorch against fp64, a table of passes and failures (docs/verify.md).

python tools/verify/verify_experts.py examples/experts_to_verify.py:grouped_mm
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import click
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sonicmoe.cli.activation import activation_options, size_options
from sonicmoe.cli.bisect import default_device
from sonicmoe.cli.framework import load_framework
from sonicmoe.cli.refusals import OneLineCommand
from sonicmoe.cli.screen import Activity, print_table
from sonicmoe.diagnostics.cases import VERIFIED, Sizes
from sonicmoe.engine.capabilities import REFERENCE

WIDTH = 62  # of a detail, so that a row has 100 columns; --json has all of it
LAYOUTS = ("interleaved", "halves", "fused", "fused_interleaved")


@click.command(cls=OneLineCommand)
@click.argument("name", metavar="MODULE:FUNCTION")
@click.option("--layout", type=click.Choice(LAYOUTS), default="halves", show_default=True,
              help="How w1 and w2 lie (docs/migrating.md).")  # fmt: skip
@activation_options
@click.option("--dtype", type=click.Choice(REFERENCE.dtypes), default="float32", show_default=True)
@click.option("--device", help="[default: the first GPU, else cpu]")
@click.option("--tolerance", type=click.FloatRange(0, min_open=True),
              help="Most relative error of an expert.  [default: by dtype]")  # fmt: skip
@click.option("--check", multiple=True, metavar="NAME",
              help="A row of the table; may be repeated.  [default: all]")  # fmt: skip
@size_options(VERIFIED)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def main(
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
    import expert_checks as tool
    from experts_under_test import Subject, load

    for asked in check:
        if asked not in tool.CHECKS:
            raise click.BadParameter(f"{asked!r}; needed: one of {list(tool.CHECKS)}", ctx)
    place = device or default_device()
    subject = Subject(
        load(name), layout, activation, dict(parameters), dtype, place, tolerance, Sizes(**sizes), name
    )  # fmt: skip
    findings = []
    with Activity("verify_experts.py") as doing:
        for asked in check or tool.CHECKS:
            doing.begin(asked)
            findings.append(tool.verify(asked, subject))
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


if __name__ == "__main__":
    main()
