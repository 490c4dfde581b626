"""One rank: nothing travels, the contract stays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import autograd
from ..autograd import DifferentiableCall
from ..interop import grad_enabled, is_cuda, plain_ops, requires_grad
from ..quant.format import BlockScaledTensor
from ..routing.ids import count_experts
from .dispatcher import Dispatcher
from .fp8_rows import Forms, SentGradient, check_fp8, quantised, stand_in
from .interface import Dispatched, check_combine, check_num_experts, zero_where_not_here

Tensor = torch.Tensor


class LocalHandle(NamedTuple):
    """The number of rows delivered, and who is left a gradient that is quantised."""

    rows: int
    gradient: SentGradient | None


class QuantizeCall(DifferentiableCall):
    """Quantises tokens in place of sending them; see `DispatchCall` for the output."""

    tokens: BlockScaledTensor | None = None

    def __init__(self, form: bool | str, gradient: SentGradient | None) -> None:
        self.form, self.gradient = form, gradient

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool = False) -> tuple[Tensor, None]:
        """`[T, H]`, which stands for the codes."""
        (x,) = inputs
        self.dtype = x.dtype
        self.tokens = quantised(x.detach().contiguous(), self.form)
        return stand_in(self.tokens), None

    def backward(
        self, gradients: tuple[Tensor, ...], saved: Any = None, **_: Any
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """dx of the codes is that of the tokens."""
        if self.gradient is not None:
            self.gradient.check_taken()
        return (gradients[0].to(self.dtype),), []


class QuantizeGradientCall(DifferentiableCall):
    """Quantises the gradient of its output in place of sending it."""

    def __init__(self, gradient: SentGradient) -> None:
        self.gradient = gradient

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool = False) -> tuple[Tensor, None]:
        """A copy: an operation that returns its input is none to autograd, and callers may write to
        the result in place, which a view would forbid.
        """
        (out,) = inputs
        return out.detach().clone(), None

    def backward(
        self, gradients: tuple[Tensor, ...], saved: Any = None, **_: Any
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """What stands for the gradient."""
        (dout,) = gradients
        with plain_ops():
            rows = quantised(dout.contiguous(), self.gradient.form)
            return (self.gradient.leave(rows, dout.dtype),), []


class LocalDispatcher(Dispatcher):
    """The dispatcher of a group of one. A token whose slots are all dropped keeps its row, with
    every index -1.
    """

    name = "local"

    def __init__(
        self, num_experts: int, fp8: bool | str = False, fp8_grad: bool | str = False
    ) -> None:
        """All experts are local. fp8, fp8_grad: quantise tokens and gradients where a dispatch does
        not say otherwise.
        """
        check_num_experts(num_experts, 1)
        check_fp8(fp8)
        check_fp8(fp8_grad, "fp8_grad")
        self.fp8, self.fp8_grad = fp8, fp8_grad
        self.num_experts = self.num_local_experts = num_experts

    def _send(self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms) -> Dispatched:
        received = self._delivered(x, ids, topk_weights, forms)
        if not forms.tokens:
            return received
        call = QuantizeCall(forms.tokens, received.dout_source)
        recorded = grad_enabled() and requires_grad(x)
        dx_to = autograd.apply(call, (x,)) if recorded else call.forward((x,))[0]
        tokens, call.tokens = call.tokens, None
        assert tokens is not None
        return received._replace(
            x=tokens.codes, x_scale=tokens.scale_inv, dx_to=dx_to if recorded else None
        )

    def _delivered(self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms) -> Dispatched:
        rows = int(x.shape[0])
        source = SentGradient(forms.gradients) if forms.gradients else None
        handle = LocalHandle(rows, source)
        # Without tokens the counts are known on any device, and there is nothing to select.
        if rows == 0:
            none = [0] * self.num_experts
            return Dispatched(x, none, ids, topk_weights, handle, dout_source=source)
        probs = zero_where_not_here(topk_weights, ids, self.num_experts)
        # Counting waits for a GPU; the routing metadata then counts on the device.
        counts = None if is_cuda(ids) else count_experts(ids, self.num_experts).tolist()
        return Dispatched(x, counts, ids, probs, handle, dout_source=source)

    def combine(self, out: Tensor, handle: LocalHandle) -> Tensor:
        check_combine(out, handle, LocalHandle, lambda: handle.rows)
        if handle.gradient is None or not (grad_enabled() and requires_grad(out)):
            return out
        return autograd.apply(QuantizeGradientCall(handle.gradient), (out,))  # type: ignore[no-any-return]
