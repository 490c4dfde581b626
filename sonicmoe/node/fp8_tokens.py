"""Tokens that arrive in FP8, at the node's border: what they are, and who gets their gradient.

Autograd casts the gradient of an e4m3 tensor to e4m3, without a scale: above 448 it saturates, and
small values vanish. So the gradient goes to `dx_to`, a bf16 tensor of the graph that stands beside
the codes. docs/parallel.md, "Tokens that arrive in FP8", has the reasons.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine.interface import token_format
from ..engine.settings import TokenFormat
from ..errors import DTypeError, ShapeError, expect
from ..interop import (
    IS_PADDLE,
    dtype_name,
    grad_enabled,
    require_framework_tensor,
    require_same_device,
    requires_grad,
)
from ..quant.tokens import check_fp8_tokens, checked_tokens

Tensor = torch.Tensor


def check_token_gradient(x: Tensor, x_scale: Any, dx_to: Any) -> None:
    """Check codes, multipliers and the receiver of the gradient, without reading device memory.

    Raises:
        DTypeError, ShapeError, DeviceError, FrameworkError: naming the argument, what came and what
            is needed.
    """
    # Asked at every forward, so messages are composed for errors only.
    if x_scale is None:
        if dx_to is not None:
            raise DTypeError(
                f"dx_to came with x in {dtype_name(x.dtype)}, which gets its gradient itself; needed: no dx_to, or x in "
                "float8_e4m3fn with x_scale"
            )
        return
    check_fp8_tokens(x, x_scale)
    if dx_to is x:
        _check_own_gradient(x)
        return
    if requires_grad(x) and grad_enabled():
        raise DTypeError(
            f"x wants a gradient, and autograd would cast it to {dtype_name(x.dtype)}; needed: x detached, and a bfloat16 "
            "tensor of its shape as dx_to, which gets the gradient"
        )
    if dx_to is None:
        return
    require_framework_tensor(dx_to, "dx_to")
    if IS_PADDLE and dx_to.dtype == x.dtype:
        # Codes as they arrived, where x are these codes after their scales were brought together.
        _check_own_gradient(dx_to)
    else:
        expect(
            dx_to.dtype == torch.bfloat16,
            DTypeError,
            f"dx_to is {dtype_name(dx_to.dtype)}; needed: bfloat16, the dtype of dx",
        )
    expect(
        tuple(dx_to.shape) == tuple(x.shape),
        ShapeError,
        f"dx_to has shape {tuple(dx_to.shape)}; x needs {tuple(x.shape)}",
    )
    require_same_device([("x", x), ("dx_to", dx_to)])


def _check_own_gradient(x: Tensor) -> None:
    expect(
        IS_PADDLE,
        DTypeError,
        "dx_to is x, and PyTorch casts the gradient of a tensor to the tensor's own dtype, here float8_e4m3fn; needed: "
        "a bfloat16 tensor of x's shape",
    )
    expect(
        not (requires_grad(x) and x.is_leaf),
        DTypeError,
        "dx_to is x, and x is a leaf, whose gradient Paddle casts to float8_e4m3fn; needed: x as a PyLayer returned it "
        "that takes bfloat16 gradients (ctx.set_grad_in_dtype_consistent(False)), or a bfloat16 tensor of x's shape",
    )


def token_form(x: Tensor, x_scale: Tensor | None) -> tuple[str, TokenFormat]:
    """`(dtype that the tokens stand for, their format)`."""
    if x_scale is None:
        return dtype_name(x.dtype), TokenFormat.PLAIN
    return "bfloat16", token_format(checked_tokens(x, x_scale))


def inputs_of(
    x: Tensor, probs: Tensor, x_scale: Tensor | None, dx_to: Tensor | None
) -> tuple[Tensor, ...]:
    """The inputs of `MlpCall.forward`: the first gets the gradient of the tokens."""
    if x_scale is None:
        return x.contiguous(), probs
    if dx_to is None or dx_to is x:
        return x, probs, x_scale
    return dx_to, probs, x_scale, x
