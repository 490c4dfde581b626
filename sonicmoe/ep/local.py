"""One rank: nothing travels, the contract stays."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..autograd import DifferentiableCall
from ..errors import ShapeError, expect
from ..interop import grad_enabled, is_cuda, requires_grad
from ..quant.format import BlockScaledTensor
from ..quant.tokens import quantize_tokens
from ..routing.ids import count_experts, in_one_spelling
from .dispatcher import Dispatcher, stand_in
from .interface import Dispatched, check_dispatch, check_fp8, zero_where_not_here

Tensor = torch.Tensor


class QuantizeCall(DifferentiableCall):
    """Quantises tokens in place of sending them; see `DispatchCall` for the output."""

    tokens: BlockScaledTensor | None = None

    def __init__(self, row_scale: bool) -> None:
        self.row_scale = row_scale

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool = False) -> tuple[Tensor, None]:
        """`[T, H]`, which stands for the codes."""
        (x,) = inputs
        self.dtype = x.dtype
        self.tokens = quantize_tokens(x.detach().contiguous(), row_scale=self.row_scale)
        return stand_in(self.tokens), None

    def backward(
        self, gradients: tuple[Tensor, ...], saved: Any = None, **_: Any
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """dx of the codes is that of the tokens."""
        return (gradients[0].to(self.dtype),), []


class LocalDispatcher(Dispatcher):
    """The dispatcher of a group of one. A token whose slots are all dropped keeps its row, with
    every index -1.
    """

    name = "local"

    def __init__(self, num_experts: int, fp8: bool | str = False) -> None:
        """All experts are local. fp8: quantise tokens where a dispatch does not say otherwise."""
        check_fp8(fp8)
        self.fp8 = fp8
        self.num_experts = self.num_local_experts = num_experts

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        fp8: bool | str | None = None,
    ) -> Dispatched:
        """See `Dispatcher.dispatch`; `handle` is the number of rows."""
        check_dispatch(x, topk_idx, topk_weights)
        fp8 = self.fp8 if fp8 is None else fp8
        check_fp8(fp8)
        if fp8:
            plain = self.dispatch(x, topk_idx, topk_weights, fp8=False)
            call = QuantizeCall(fp8 == "row")
            recorded = grad_enabled() and requires_grad(x)
            dx_to = autograd.apply(call, (x,)) if recorded else call.forward((x,))[0]
            tokens, call.tokens = call.tokens, None
            assert tokens is not None
            return plain._replace(
                x=tokens.codes, x_scale=tokens.scale_inv, dx_to=dx_to if recorded else None
            )
        indices = in_one_spelling(topk_idx.detach().to(torch.int64), self.num_experts)
        # Without tokens the counts are known on any device, and there is nothing to select.
        if int(x.shape[0]) == 0:
            return Dispatched(x, [0] * self.num_experts, indices, topk_weights, 0)
        probs = zero_where_not_here(topk_weights, indices, self.num_experts)
        # Counting waits for a GPU; the routing metadata then counts on the device.
        counts = None if is_cuda(indices) else count_experts(indices, self.num_experts).tolist()
        return Dispatched(x, counts, indices, probs, int(x.shape[0]))

    def combine(self, out: Tensor, handle: Any) -> Tensor:
        expect(
            int(out.shape[0]) == handle,
            ShapeError,
            f"out has shape {tuple(out.shape)}; the dispatch of this handle delivered {handle} rows: needed [{handle}, H]",
        )
        return out
