"""The gradient of the node's output, where it arrives in FP8.

A combine that runs its backward in FP8 delivers e4m3 codes and their scales, and autograd carries
one tensor. So the scales, and under PyTorch the codes too, come past autograd: the node asks a
source for them when its backward runs. docs/parallel.md, "Gradients that arrive in FP8", has the
reasons.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..engine.capabilities import gradient_problem
from ..engine.interface import Engine, EngineSettings, Tokens, token_format
from ..engine.select import announce_gradients
from ..errors import DTypeError, expect
from ..interop import device_name
from ..quant.format import BlockScaledTensor
from ..quant.tokens import check_fp8_tokens, to_bfloat16, tokens_of

Tensor = torch.Tensor


class GradientSource(Protocol):
    """Who has the gradient of one output of the node."""

    def take(self, gradient: Tensor) -> BlockScaledTensor | Tensor:
        """The gradient `[T, H]`: codes and fp32 scales per row and 128 columns, or per row
        (`quant/tokens.py`), or a plain tensor. Called once by every backward.

        Args:
            gradient: what autograd delivered. Where the codes came past it, nobody has written or
                may read its values.
        """


def check_source(dout_source: Any) -> None:
    """Refuse a source that no backward could ask.

    Raises:
        DTypeError: naming what came and what is needed.
    """
    expect(
        dout_source is None or callable(getattr(dout_source, "take", None)),
        DTypeError,
        f"dout_source is {type(dout_source).__name__}; needed: an object with take(gradient), or None",
    )


def gradient_from(
    source: GradientSource, delivered: Tensor, engine: Engine, settings: EngineSettings
) -> Tokens:
    """The gradient of the output from `source`, as this engine takes it.

    Raises:
        DTypeError, ShapeError, DeviceError, FrameworkError: the source gave something else.
    """
    found = source.take(delivered)
    if not isinstance(found, BlockScaledTensor):
        expect(
            isinstance(found, torch.Tensor),
            DTypeError,
            f"dout_source.take returned {type(found).__name__}; needed: a BlockScaledTensor or a tensor",
        )
        return found
    check_fp8_tokens(found.codes, found.scale_inv, "dout")
    dout = tokens_of(found.codes.detach(), found.scale_inv.detach())
    reason = gradient_problem(engine.record, settings, token_format(dout))
    if reason is None:
        return dout
    announce_gradients(engine.name, device_name(dout.codes), reason)
    return to_bfloat16(dout)
