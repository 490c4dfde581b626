"""Options that several commands have, and the line that says which framework one runs on."""

from __future__ import annotations

from typing import Any

import click

from ..enums import ActivationType
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


def activation_options(command: Any) -> Any:
    """`--activation NAME`, and `--activation-parameter NAME=VALUE` as `parameters`, (name, number)
    pairs. Whether the activation has such a parameter is asked by whoever computes with it.
    """
    parameter = click.option(
        "--activation-parameter", "parameters", multiple=True, metavar="NAME=VALUE", callback=_read,
        help="A number of the activation that the layers set (limit=7); give it again for another one.",
    )  # fmt: skip
    activation = click.option(
        "--activation", type=click.Choice([member.value for member in ActivationType]),
        default=ActivationType.SWIGLU.value, show_default=True, help="The expert's activation.",
    )  # fmt: skip
    # The one that is applied first stands last in the help.
    return activation(parameter(command))


def _read(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    return tuple(map(_read_parameter, texts))


def _read_parameter(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise click.BadParameter(f"{text!r}; needed: NAME=VALUE, for example limit=7") from None
