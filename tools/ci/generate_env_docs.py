"""Write docs/env.md from the registry of environment flags; `--check` only compares, exit code 1
when it is out of date.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from sonicmoe.config import FLAGS, FLEETS_VARIABLES, HONOURED_VARIABLES
from sonicmoe.flags import PREFIX, Flag
from sonicmoe.frameworks import RULE

PAGE_WIDTH = 100
PAGE = Path(__file__).resolve().parents[2] / "docs" / "env.md"

HEADER = f"""\
# Environment variables

<!-- Generated from sonicmoe/config.py by `make docs`; edit the registry there. -->

Each flag is also a field of `SonicMoEConfig`. An explicit field beats the environment, which beats
the default; `with cfg.activate():` puts a configuration in force for everything that was given none
of its own. `sonicmoe doctor` prints those that are set, and with `--json` all in force.

A value that is not understood is refused by every command, and by the first call that needs a
configuration. A set `{PREFIX}*` name that is not listed here, in any case, is ignored with a
warning that suggests the nearest flag; so is a name that comes near a flag, as `SONICMOE_FP8` does.

A process reads the environment once, when it first needs a configuration: a command at its start,
a program at its first forward. It does not obey a variable that changes later; activate a
`SonicMoEConfig` instead. A relative directory is taken from the working directory of that moment.
[recipes/flag.md](recipes/flag.md) has the recipe for a new flag.

| variable | field | values | default | meaning |
|---|---|---|---|---|
"""

_RULE = textwrap.fill(
    f"No variable chooses between PyTorch and Paddle. A program chooses by what it imports (README); "
    f"a command takes {RULE}. `--framework torch` and `--framework paddle` override that. Where both "
    "are installed, the command says on stderr which one it took; `doctor` says it on its screen.",
    PAGE_WIDTH,
)
FRAMEWORK_TEXT = f"""
## Which framework a command runs on

{_RULE}

| command | framework |
|---|---|
| `doctor`, `train`, `bisect` | by this rule; `train --resume` stays with that of its checkpoint |
| `bench` | PyTorch, whose events and profiler it measures with |
| `warmup` | none: the kernels serve both |
"""
HONOURED_TEXT = """
## Variables of other tools

The tools behind them read these variables, and this package leaves them as they are. It passes
over the `ptxas` of a PyTorch wheel, because Inductor sets `TRITON_PTXAS_PATH` to that when it first
compiles, and a process would look for other kernels than its warm-up has made.

"""
FLEETS_TEXT = """
## Variables of PaddleFleet's own engine

Ignored, with a warning that says so.

| variable | there, and here |
|---|---|
"""


def table_row(flag: Flag[Any]) -> str:
    """One row of the flag table."""
    default = "unset" if flag.plain_default is None else f"`{flag.shown_default}`"
    cells = (f"`{flag.env}`", f"`{flag.field}`", flag.values.listed, default, flag.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def render() -> str:
    """The whole page."""
    honoured = "".join(f"* `{name}`\n" for name in HONOURED_VARIABLES)
    fleets = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in FLEETS_VARIABLES.items())
    flags = "".join(table_row(flag) for flag in FLAGS)
    return HEADER + flags + FRAMEWORK_TEXT + HONOURED_TEXT + honoured + FLEETS_TEXT + fleets


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Compare instead of writing.")
def main(check: bool) -> None:
    """Write or compare the page."""
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else None
    page = render()
    if check and current != page:
        raise click.ClickException("docs/env.md is out of date: run `make docs`")
    if not check:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
