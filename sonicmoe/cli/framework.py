"""`--framework`, the same in every command that computes, and the line that says which one it is."""

from __future__ import annotations

from typing import Any

import click

from ..frameworks import AUTO, FRAMEWORKS, RULE, FrameworkChoice, choose, load
from .screen import Activity, progress_console

CHOICES = (AUTO, *FRAMEWORKS)
AUTO_HELP = f"auto: {RULE}."


def framework_option(text: str) -> Any:
    """`--framework auto|torch|paddle`; `text` says what it runs."""
    return click.option(
        "--framework",
        type=click.Choice(CHOICES),
        default=AUTO,
        show_default=True,
        help=f"{text} {AUTO_HELP}",
    )


def load_framework(requested: str) -> None:
    """Choose by the rule, say so on stderr where there was a choice, and bind the process to it.
    Errors as of `frameworks.choose` and `frameworks.load`.
    """
    # Said before the import, which takes seconds: whoever wanted the other one need not wait.
    choice = choose(requested)
    line = choice_line(choice)
    if line is not None:
        progress_console().print(line)
    with Activity(f"importing {choice.name}"):
        load(choice.name)


def choice_line(choice: FrameworkChoice) -> str | None:
    """What a command says on stderr about its framework; None where only one was possible."""
    return None if choice.other is None else f"framework: {choice.name} ({choice.reason})"
