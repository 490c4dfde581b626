"""The node's border: what is refused of the arguments of a call, without reading device memory, and
what arrives in FP8.

**Tokens in FP8.** Autograd casts the gradient of an e4m3 tensor to e4m3, without a scale: above 448
it saturates, and small values vanish. So the gradient goes to `dx_to`, a bf16 tensor of the graph
that stands beside the codes.

**Gradients of the output in FP8.** A combine that runs its backward in FP8 delivers e4m3 codes and
their scales, and autograd carries one tensor. So the scales, and under PyTorch the codes too, come
past autograd: the node asks a source for them when its backward runs.

docs/parallel.md, "Tokens that arrive in FP8" and "Gradients that arrive in FP8", has the reasons.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ..engine.capabilities import format_problem
from ..engine.interface import TOKEN_DTYPES, Engine, EngineSettings, Tokens, token_format
from ..engine.low_rank import Adapters
from ..engine.select import announce_values
from ..engine.settings import TokenFormat
from ..errors import DTypeError, ShapeError, expect
from ..interop import (
    IS_PADDLE,
    device_name,
    dtype_name,
    grad_enabled,
    require_framework_tensor,
    require_same_device,
    requires_grad,
)
from ..quant.format import BlockScaledTensor
from ..quant.tokens import check_fp8_tokens, checked_tokens, to_bfloat16, tokens_of
from ..refusals import need_dtype, need_shape, need_type
from ..routing.validation import (
    are_indices_and_probs,
    check_dispatched_tokens,
    check_indices_and_probs,
    check_sorted,
)
from ..weights.copies import WeightCopies
from .beside import named

Tensor = torch.Tensor


class GradientSource(Protocol):
    """Who has the gradient of one output of the node."""

    def take(self, gradient: Tensor) -> BlockScaledTensor | Tensor:
        """The gradient `[T, H]`: codes and fp32 scales per row and 128 columns
        (`quant/tokens.py`), or a plain tensor. Called once by every backward.

        Args:
            gradient: what autograd delivered. Where the codes came past it, nobody has written or
                may read its values.
        """


class Arrivals(NamedTuple):
    """What comes to one call beside its tokens x; see `SonicMoEMlpNode.forward`.

    is_stepped: the caller runs the backward. is_sorted: x is in expert order; the counts of its rows
    stand in place of the indices, and probs are `[T]`, or None for 1.
    """

    tokens_per_expert: Any
    indices: Any
    probs: Any
    x_scale: Any = None
    dx_to: Any = None
    dout_source: GradientSource | None = None
    copies: WeightCopies | None = None
    is_stepped: bool = False
    is_sorted: bool = False
    biases: tuple[Tensor, Tensor] | None = None
    adapters: Adapters | None = None

    def _check(self, x: Any, experts: int, hidden: int) -> None:
        """Refuse what does not fit a layer of E and H, without reading device memory."""
        if self.is_sorted:
            self._check_sorted(x, experts, hidden)
            return
        # First, because the outputs of other dispatch modes deserve a message of their own; the
        # general checks would call them a wrong shape.
        check_dispatched_tokens(x, self.indices, self.probs, self.tokens_per_expert, self.x_scale)
        require_framework_tensor(x, "x")
        check_indices_and_probs(self.indices, self.probs, experts)
        wanted = (int(self.indices.shape[0]), hidden)
        if tuple(x.shape) != wanted:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; {wanted[0]} rows of dispatched_indices and "
                f"hidden_size {wanted[1]} need {wanted}"
            )
        if self.x_scale is not None:
            check_fp8_tokens(x, self.x_scale)
            _check_token_gradient(x, self.dx_to)
        elif self.dx_to is not None:
            raise DTypeError(
                f"dx_to came with x in {dtype_name(x.dtype)}, which gets its gradient itself; "
                "needed: no dx_to, or x in float8_e4m3fn with x_scale"
            )
        source = self.dout_source
        if source is not None and not callable(getattr(source, "take", None)):
            raise DTypeError(
                f"dout_source is {type(source).__name__}; needed: an object with take(gradient), "
                "or None"
            )
        if self.copies is not None:
            needed = "what make_copies() returned, or None"
            need_type("copies", self.copies, WeightCopies, needed)

    def _check_sorted(self, x: Any, experts: int, hidden: int) -> None:
        require_framework_tensor(x, "x")
        need_shape(len(x.shape) == 2 and int(x.shape[1]) == hidden, "x", x, f"[T, {hidden}]")
        check_sorted(self.indices, int(x.shape[0]), self.probs)
        need_shape(int(self.indices.shape[0]) == experts, "counts", self.indices, (experts,))
        require_same_device([("x", x), ("counts", self.indices)])

    def form(self, x: Tensor) -> tuple[torch.dtype, TokenFormat]:
        """`(dtype that the tokens stand for, their format)`."""
        if self.x_scale is None:
            return x.dtype, TokenFormat.PLAIN
        # Senders quantise bf16 tokens, and out is bf16 again.
        return torch.bfloat16, token_format(checked_tokens(x, self.x_scale))

    def inputs(self, x: Tensor, experts: int, hidden: int) -> tuple[Tensor, ...]:
        """The inputs of `NodeCall.forward`, of arguments that fit a layer of E and H. The first gets
        the gradient of the tokens; biases, and then the factors of adapters, come last.
        """
        if self._are_usual(x, hidden):
            return x.contiguous(), self.probs
        self._check(x, experts, hidden)
        needed = "an Adapters, or None"
        need_type("adapters", self.adapters, (Adapters, type(None)), needed)
        return (*self._tokens(x), *[tensor for _, tensor in named(self.biases, self.adapters)])

    def _are_usual(self, x: Any, hidden: int) -> bool:
        """Whether these are plain tokens with ids and probabilities that fit, and nothing beside: one
        expression without messages, because every call asks.
        """
        return (
            self.x_scale is None
            and self.dx_to is None
            and self.dout_source is None
            and self.copies is None
            and self.biases is None
            and self.adapters is None
            and not self.is_sorted
            and isinstance(x, torch.Tensor)
            and are_indices_and_probs(self.indices, self.probs, x)
            and x.dtype in TOKEN_DTYPES
            and tuple(x.shape) == (self.indices.shape[0], hidden)
        )

    def _tokens(self, x: Any) -> tuple[Tensor, ...]:
        if self.is_sorted and self.probs is None:
            return (x.contiguous(),)
        # Outside the call, so that autograd records the copy and gives the caller's x its gradient.
        if self.x_scale is None:
            return x.contiguous(), self.probs
        # Autograd gives dx to the first input, so the receiver stands there.
        if self.dx_to is None or self.dx_to is x:
            return x, self.probs, self.x_scale
        return self.dx_to, self.probs, self.x_scale, x


def tokens_among(inputs: tuple[Tensor, ...]) -> Tensor:
    """x among what `Arrivals.inputs` gave."""
    return inputs[3] if len(inputs) > 3 else inputs[0]


def _check_token_gradient(x: Tensor, dx_to: Any) -> None:
    """Check the receiver of the gradient of tokens in FP8."""
    if dx_to is x:
        _check_own_gradient(x)
        return
    if requires_grad(x) and grad_enabled():
        raise DTypeError(
            f"x wants a gradient, and autograd would cast it to {dtype_name(x.dtype)}; needed: x "
            "detached, and a bfloat16 tensor of its shape as dx_to, which gets the gradient"
        )
    if dx_to is None:
        return
    require_framework_tensor(dx_to, "dx_to")
    if IS_PADDLE and dx_to.dtype == x.dtype:
        # Codes as they arrived, where x are these codes after their scales were brought together.
        _check_own_gradient(dx_to)
    else:
        need_dtype("dx_to", dx_to, torch.bfloat16)
    need_shape(tuple(dx_to.shape) == tuple(x.shape), "dx_to", dx_to, f"{tuple(x.shape)}, as x")
    require_same_device([("x", x), ("dx_to", dx_to)])


def _check_own_gradient(x: Tensor) -> None:
    expect(
        IS_PADDLE,
        DTypeError,
        "dx_to is x, and PyTorch casts the gradient of a tensor to the tensor's own dtype, here "
        "float8_e4m3fn; needed: a bfloat16 tensor of x's shape",
    )
    expect(
        not (requires_grad(x) and x.is_leaf),
        DTypeError,
        "dx_to is x, and x is a leaf, whose gradient Paddle casts to float8_e4m3fn; needed: x as a "
        "PyLayer returned it that takes bfloat16 gradients "
        "(ctx.set_grad_in_dtype_consistent(False)), or a bfloat16 tensor of x's shape",
    )


def gradient_from(
    source: GradientSource, delivered: Tensor, engine: Engine, settings: EngineSettings
) -> Tokens:
    """The gradient of the output from `source`, as this engine takes it; anything else raises."""
    found = source.take(delivered)
    if not isinstance(found, BlockScaledTensor):
        expect(
            isinstance(found, torch.Tensor),
            DTypeError,
            f"dout_source.take returned {type(found).__name__}; needed: a BlockScaledTensor or a "
            "tensor",
        )
        return found
    # A source is the caller's, so what it gives is checked like an argument.
    check_fp8_tokens(found.codes, found.scale_inv, "dout")
    dout = tokens_of(found.codes.detach(), found.scale_inv.detach())
    reason = format_problem(engine.record, settings, token_format(dout), "dout")
    if reason is None:
        return dout
    # The engine cannot read this format. It gets the values, and the log says so once.
    announce_values("gradients", engine.name, device_name(dout.codes), reason)
    return to_bfloat16(dout)
