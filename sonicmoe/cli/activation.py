"""The options that say which activation experts have."""

from __future__ import annotations

from typing import Any

import click

from ..enums import ActivationType


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
