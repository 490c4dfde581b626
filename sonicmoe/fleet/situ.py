"""SiTU-GLU with its numbers as one word, the form in which PaddleFleet hands it from layer to layer:
`situ_glu:b=4.0:lb=25.0`, and `lb=none` where the up half is not bounded.
"""

from __future__ import annotations

from math import inf
from typing import Any

from ..enums import ACTIVATIONS, ActivationType
from ..errors import ConfigError

SITU_GLU = ActivationType.SITU_GLU.value
_BETA, _LINEAR_BETA = ACTIVATIONS[ActivationType.SITU_GLU].parameters
_OFF = ("none", "null", "off")
# Both name how tanh is computed there. The kernels here have one tanh.
_PRECISIONS = ("approx", "precise")


def encode_situ_activation(
    beta: float = 4.0, linear_beta: float | None = 25.0, precise: bool = True
) -> str:
    """The description of SiTU-GLU with these numbers; `situ_activation` is the inverse.

    Args:
        beta: the bound of the gate half.
        linear_beta: the bound of the up half; None, False or "none" for no bound.
        precise: False adds `:approx`, which changes nothing here.

    Raises:
        ConfigError: a number that is not in the range of the activation.
    """
    bound = linear_beta_of(linear_beta)
    # `repr` of a float reads back as the same float.
    words = [SITU_GLU, f"b={beta_of(beta)!r}", f"lb={'none' if bound is None else repr(bound)}"]
    return ":".join(words if precise else [*words, "approx"])


def parse_situ_activation(activation: Any) -> dict[str, float | None] | None:
    """The numbers that a description has, by parameter (`beta`, `linear_beta`); None where it
    describes another activation.
    """
    if not isinstance(activation, str) or activation.split(":")[0] != SITU_GLU:
        return None
    found: dict[str, float | None] = {}
    for part in activation.split(":")[1:]:
        name, _, text = part.partition("=")
        if name == "b":
            found["beta"] = beta_of(_number(text), activation)
        elif name == "lb":
            off = text.strip().lower() in _OFF
            found["linear_beta"] = None if off else linear_beta_of(_number(text), activation)
        elif part not in _PRECISIONS:
            raise ConfigError(
                f"activation_type is {activation!r}, and {part!r} is not understood; needed: "
                f"{SITU_GLU}:b=<number>:lb=<number or none>"
            )
    return found


def beta_of(value: Any, source: str = "situ_beta") -> float:
    """`beta`, checked; `source` is what the message names."""
    # The registry of activations knows the range. The name of the field is known here.
    try:
        return _BETA.read(value)
    except ConfigError:
        raise ConfigError(f"{source}: beta is {value!r}; needed: {_BETA}") from None


def linear_beta_of(value: Any, source: str = "situ_linear_beta") -> float | None:
    """`linear_beta`, checked; None where there is no bound, which False and "none" say too."""
    if value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
        return None
    try:
        bound = _LINEAR_BETA.read(value)
    except ConfigError:
        raise ConfigError(f"{source}: linear_beta is {value!r}; needed: {_LINEAR_BETA}") from None
    return None if bound == inf else bound


def _number(text: str) -> float | str:
    """A number where the text is one; else the text, which the check then names."""
    try:
        return float(text)
    except ValueError:
        return text
