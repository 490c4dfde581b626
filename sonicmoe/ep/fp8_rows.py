"""Rows that travel in FP8, and what stands for them in autograd, which would cast e4m3.

Tokens: the codes are no output of the dispatch. A tensor of their shape is, and gets their gradient.
Gradients: the combine's backward returns a tensor of their shape, and leaves codes and scales with
the source that the node asks (`layer/arrivals.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ConfigError, expect
from ..interop import IS_PADDLE, data_ptr
from ..quant.format import BlockScaledTensor

Tensor = torch.Tensor


class Forms(NamedTuple):
    """Whether tokens of the forward, and dout of the backward, travel in FP8."""

    tokens: bool
    gradients: bool


def check_forms(fp8: object, fp8_grad: object) -> None:
    """Raise ConfigError for anything but True and False."""
    for name, form in (("fp8", fp8), ("fp8_grad", fp8_grad)):
        words = f"{name} is {form!r}; needed: True or False"
        expect(isinstance(form, bool), ConfigError, words)


def stand_in(
    rows: BlockScaledTensor, dtype: torch.dtype = torch.bfloat16, value: float = 0.0
) -> Tensor:
    """A tensor of the rows' shape and of one element's memory, which nobody reads."""
    count, hidden = rows.shape
    codes = rows.codes
    if count == 0:
        return torch.zeros([0, hidden], dtype=dtype, device=codes.device)
    one = torch.full([1], value, dtype=dtype, device=codes.device)
    return one.as_strided([count, hidden], [0, 0])  # `expand` copies under Paddle


class SentGradient:
    """The `GradientSource` of one dispatch: holds codes and scales between the backward of the
    combine, which receives them, and that of the node, which takes them.
    """

    def __init__(self) -> None:
        self._rows: BlockScaledTensor | None = None
        self._stand_in: Tensor | None = None

    def leave(self, rows: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
        """Called by the combine's backward; what it returns is the gradient in autograd."""
        # NaN, so that experts which do not know of the source train on no invented gradient. Where
        # PyTorch looks for the first NaN it must not find this one.
        value = 0.0 if _looks_for_nan() else float("nan")
        self._rows, self._stand_in = rows, stand_in(rows, dtype, value)
        return self._stand_in

    def take(self, gradient: Tensor) -> BlockScaledTensor:
        """See `GradientSource`; raises where nothing has arrived, or `gradient` is not what the
        combine's backward returned.
        """
        rows, expected = self._rows, self._stand_in
        straight = "needed: the experts' output straight into combine(out, handle)"
        if rows is None or expected is None:
            raise ConfigError(
                "dout_source has no gradient: this dispatch's combine has run no backward since "
                f"the last one; {straight}, with the handle of the same dispatch"
            )
        if data_ptr(gradient) != data_ptr(expected):
            raise ConfigError(
                "the gradient of the experts' output is not the one that the combine of this "
                f"dispatch returned; {straight}, and nowhere else (an operation in between, a "
                "second use or a hook cannot see a gradient that travels in FP8), or fp8_grad=False"
            )
        self._rows = self._stand_in = None
        return rows

    def check_taken(self) -> None:
        """Called by the dispatch's backward, which comes after the experts': raise ConfigError where
        nobody took the gradient.
        """
        if self._rows is not None:
            raise ConfigError(
                "the gradient of the experts' output came in FP8 (fp8_grad) and the experts did not "
                "ask for it; needed: node(..., dout_source=received.dout_source), or fp8_grad=False"
            )


def _looks_for_nan() -> bool:
    return not IS_PADDLE and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
