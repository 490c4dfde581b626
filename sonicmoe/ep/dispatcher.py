"""The differentiable dispatcher over any transport, and the transport of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import autograd
from ..autograd import DifferentiableCall
from ..borrowed import Borrowed
from ..errors import ShapeError, expect
from ..interop import grad_enabled, is_cuda, plain_ops, require_framework_tensor, requires_grad
from ..quant.format import BlockScaledTensor
from ..quant.tokens import quantize_tokens
from ..refusals import need_type
from ..routing.ids import count_experts, in_one_spelling
from .fp8_rows import Forms, SentGradient, check_forms, stand_in
from .interface import (
    Dispatched,
    Meanwhile,
    Received,
    Tokens,
    Transport,
    check_dispatch,
    nothing,
    zero_rows_unless,
    zero_where_not_here,
)

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Route:
    """One dispatch's way there and back.

    topk_idx int64 `[T, K]` as sent, indices int64 `[R, K]` as received: the masks of dropped and
    foreign slots, which are -1 in both. gradient: who is left the gradient that travels in FP8. given:
    what the caller has of it.
    """

    transport: Transport
    handle: Any
    topk_idx: Tensor
    indices: Tensor
    gradient: SentGradient | None = None
    given: Borrowed = field(init=False)

    def __post_init__(self) -> None:
        """The caller was given `indices`, and may write them."""
        object.__setattr__(self, "given", Borrowed([("dispatched_indices", self.indices)]))

    def dispatch_backward(self, dx: Tensor, dprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the received rows -> gradients of `x [T, H]` and `topk_weights [T, K]`."""
        transport = self.transport
        self.given.check("a dispatch and its backward")
        if self.gradient is not None:
            self.gradient.check_taken()
        weights = dprobs.to(torch.float32)
        if not transport.masks:
            # Gradients at slots of other ranks have no meaning here, and unwritten ones may hold
            # NaN. They must be zero before they are summed over ranks.
            weights = zero_where_not_here(weights, self.indices, transport.num_local_experts)
        # The transpose of "send to every rank" is "sum over ranks", so the backward of dispatch is
        # a combine and that of combine a dispatch along the same routes.
        combined, dweights = transport.combine(dx.contiguous(), self.handle, weights.contiguous())
        assert dweights is not None
        if transport.masks:
            return combined, dweights
        # The second mask is that of the sender: a slot that was dropped there contributed to
        # nothing.
        return combined, zero_where_not_here(dweights, self.topk_idx, transport.num_experts)

    def combine(self, out: Tensor) -> Tensor:
        return self.transport.combine(out.contiguous(), self.handle)[0]

    def combine_backward(self, dout: Tensor) -> Tensor:
        """`[T, H]` -> `[R, H]`; rows that are not real are exact zeros. Where gradients travel in FP8
        the result stands for them.
        """
        dout = dout.contiguous()
        if self.gradient is not None:
            with plain_ops():
                sent = quantize_tokens(dout)
                arrived = self.transport.dispatch_cached(sent, self.handle)
                assert isinstance(arrived, BlockScaledTensor)
                # Rows that are not real stay as they are: engines read no row without a slot.
                return self.gradient.leave(arrived, dout.dtype)
        rows = self.transport.dispatch_cached(dout, self.handle)
        assert not isinstance(rows, BlockScaledTensor)
        if self.transport.exact_rows:
            return rows
        self.given.check("a dispatch and the backward of its combine")
        # They hold what was in memory, or gradients of other ranks' experts. A GEMM that reads
        # padding would spread a NaN from there.
        return zero_rows_unless((self.indices >= 0).to(torch.int32).sum(1) > 0, rows)


class DispatchCall(DifferentiableCall):
    """One dispatch of `(x, topk_weights)`, whose route and counts are there once it has run. Under
    autograd a gradient that did not arrive counts as zeros: the collective of the backward runs on
    every rank or on none.

    Tokens that travel in FP8 are no output, because autograd would cast their gradient to e4m3.
    They are left in `tokens` for the caller to take away, and the output is a tensor of their shape
    that stands for them.
    """

    route: Route
    tokens_per_expert: list[int] | None
    tokens: BlockScaledTensor | None = None

    def __init__(
        self, transport: Transport, topk_idx: Tensor, forms: Forms, meanwhile: Meanwhile = nothing
    ) -> None:
        """`topk_idx` is no differentiable input; it travels here."""
        self.transport, self.topk_idx, self.forms = transport, topk_idx, forms
        self.meanwhile = meanwhile

    def explain(self, error: Exception, during: str) -> None:
        self.transport.explain(error, "dispatch" if during == "forward" else "combine of dx")

    def forward(
        self, inputs: tuple[Tensor, ...], *, save: bool = False
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """`(x [R, H], probs [R, K])`."""
        x, topk_weights = inputs
        self.dtype = x.dtype
        with plain_ops():
            plain = x.detach().contiguous()
            sent: Tokens = quantize_tokens(plain) if self.forms.tokens else plain
            # Libraries read raw pointers and know nothing of strides or of autograd.
            weights = topk_weights.detach().contiguous()
            # Taken away, because the call lives in the graph, and would keep all that this function holds.
            meanwhile, self.meanwhile = self.meanwhile, nothing
            received = self.transport.dispatch(sent, self.topk_idx, weights, meanwhile)
            ids, probs = received.topk_idx, received.topk_weights
            # Some transports deliver weights at other ranks' slots, and some leave them unwritten.
            # Callers get exact zeros.
            if not self.transport.masks:
                probs = zero_where_not_here(probs, ids, self.transport.num_local_experts)
        self.tokens_per_expert = received.tokens_per_expert
        gradient = SentGradient() if self.forms.gradients else None
        self.route = Route(self.transport, received.handle, self.topk_idx, ids, gradient)
        if isinstance(received.x, BlockScaledTensor):
            self.tokens = received.x
            return (stand_in(received.x), probs), None
        return (received.x, probs), None

    def backward(
        self, gradients: tuple[Tensor, ...], saved: Any = None, **_: Any
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """A combine of dx that carries dprobs."""
        dx, dweights = self.route.dispatch_backward(*gradients)
        return (dx.to(self.dtype), dweights), []


class CombineCall(DifferentiableCall):
    """One combine along `route`."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def explain(self, error: Exception, during: str) -> None:
        doing = "combine" if during == "forward" else "dispatch of dout"
        self.route.transport.explain(error, doing)

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool = False) -> tuple[Tensor, None]:
        """`[R, H]` -> `[T, H]`."""
        return self.route.combine(*inputs), None

    def backward(
        self, gradients: tuple[Tensor, ...], saved: Any = None, **_: Any
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """A cached dispatch of dout."""
        return (self.route.combine_backward(*gradients),), []


def _run(call: DifferentiableCall, inputs: tuple[Tensor, ...]) -> Any:
    """The outputs of a call, under autograd where an input wants a gradient. Elsewhere the autograd
    function is left out: no backward comes for which it would have to keep the route.
    """
    autograd.refuse_transforms(inputs)
    if grad_enabled() and any(map(requires_grad, inputs)):
        return autograd.apply(call, inputs)
    try:
        with plain_ops():
            return call.forward(tuple([each.detach() for each in inputs]), save=False)[0]
    except Exception as error:
        call.explain(error, "forward")
        raise


class Dispatcher:
    """Tokens to their experts and back, by DeepEP's algebra over a `Transport`. Both calls, and
    their backwards, are collectives: every rank makes them, in one order.
    """

    def __init__(self, transport: Transport, fp8: bool = False, fp8_grad: bool = False) -> None:
        """Stateless but for the transport. fp8, fp8_grad: how tokens and gradients travel where a
        dispatch does not say.
        """
        check_forms(fp8, fp8_grad)
        self.transport, self.fp8, self.fp8_grad = transport, fp8, fp8_grad
        self.num_experts = transport.num_experts
        self.num_local_experts = transport.num_local_experts
        self.name = transport.name

    @autograd.eagerly
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        fp8: bool | None = None,
        fp8_grad: bool | None = None,
        meanwhile: Meanwhile = nothing,
    ) -> Dispatched:
        """Send every token to the ranks of its experts.

        Args:
            x: `[T, H]`; T may differ between ranks and be 0.
            topk_idx: int64 or int32 `[T, K]`, global expert ids, distinct within a row
                (docs/design.md, "Routing contract", for all E experts of the group).
            topk_weights: fp32 `[T, K]`.
            fp8: send e4m3 codes with one scale per row and 128 columns; None follows the
                dispatcher's own `fp8`. The way back is bf16.
            fp8_grad: the same of the gradient that the combine sends back to the experts; None
                follows the dispatcher's own `fp8_grad`. The node then takes `dout_source`. The
                gradient of x is bf16.
            meanwhile: called once, before the host waits for the counts of the rows that come.
                Work that needs no counts fits there, such as `node.prequantize_weights`.

        Gradients of x and topk_weights flow; that of a weight is exactly 0 where its slot is
        dropped.

        Raises:
            ConfigError, DTypeError, ShapeError, DeviceError: naming the argument, what came and
                what is needed.
        """
        check_dispatch(x, topk_idx, topk_weights)
        fp8 = self.fp8 if fp8 is None else fp8
        forms = Forms(fp8, self.fp8_grad if fp8_grad is None else fp8_grad)
        check_forms(*forms)
        # Callers may mark a dropped slot by any id outside [0, E), and may write theirs afterwards.
        if self.transport.drops_any_id:
            ids = topk_idx.detach().to(torch.int64, copy=True)
        else:
            ids = in_one_spelling(topk_idx.detach().to(torch.int64), self.num_experts)
        return self._send(x, ids, topk_weights, forms, meanwhile)

    @autograd.eagerly
    def combine(self, out: Tensor, handle: Route) -> Tensor:
        """Sum the rows `[R, H]` of one dispatch over ranks, unweighted, back into source order:
        `[T, H]` in out's dtype.

        Raises:
            TypeError: `handle` is of no dispatch of a dispatcher.
            ShapeError: `out` has another number of rows than the dispatch delivered.
        """
        require_framework_tensor(out, "out")
        whose = "the `handle` of what this dispatcher's dispatch returned"
        need_type("handle", handle, Route, whose)
        rows = int(handle.indices.shape[0])
        words = (
            f"out has shape {tuple(out.shape)}; the dispatch of this handle delivered {rows} rows"
        )
        fits = len(out.shape) == 2 and int(out.shape[0]) == rows
        expect(fits, ShapeError, f"{words}: needed [{rows}, H]")
        # Where nothing has travelled, one row is a token's sum over ranks already. A gradient that
        # is to be quantised still needs an operation whose backward does it.
        if not handle.transport.moves and handle.gradient is None:
            return out
        return _run(CombineCall(handle), (out,))  # type: ignore[no-any-return]

    def _send(
        self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms, meanwhile: Meanwhile
    ) -> Dispatched:
        """`dispatch` with checked arguments; ids int64, -1 where a slot is dropped."""
        if any(forms):
            self.transport.check_quantised(int(x.shape[1]))
        call = DispatchCall(self.transport, ids.contiguous(), forms, meanwhile)
        recv_x, probs = _run(call, (x, topk_weights))
        route, counts = call.route, call.tokens_per_expert
        # Taken away, because the call lives in the graph, and would keep the codes as long.
        tokens, call.tokens = call.tokens, None
        received = Dispatched(
            recv_x, counts, route.indices, probs, route, dout_source=route.gradient
        )
        if tokens is None:
            return received
        dx_to = recv_x if requires_grad(recv_x) else None
        return received._replace(x=tokens.codes, x_scale=tokens.scale_inv, dx_to=dx_to)


class LocalTransport(Transport):
    """`Transport` of a group of one. A token whose slots are all dropped keeps its row, with every
    index -1. Its handles are None, because there are no routes.
    """

    name = "local"
    exact_rows = False
    moves = False

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, world_size=1, rank=0)

    def __reduce__(self) -> tuple[type[LocalTransport], tuple[int]]:
        """It has no group."""
        return type(self), (self.num_experts,)

    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
        meanwhile()
        counts = None
        # Counting waits for a GPU; the routing metadata then counts on the device. Without tokens
        # the counts are known on any device.
        if int(topk_idx.shape[0]) == 0:
            counts = [0] * self.num_experts
        elif not is_cuda(topk_idx):
            counts = count_experts(topk_idx, self.num_experts).tolist()
        return Received(x, topk_idx, topk_weights, counts, None)

    def dispatch_cached(self, x: Tokens, handle: None) -> Tokens:
        return x

    def combine(
        self, x: Tensor, handle: None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        # A copy in the forward: an operation that returns its input is none to autograd, and
        # callers may write to the result in place, which a view would forbid.
        return (x.clone() if weights is None else x), weights


class LocalDispatcher(Dispatcher):
    """The dispatcher of one rank without a group, or in a group of one."""

    def __init__(self, num_experts: int, fp8: bool = False, fp8_grad: bool = False) -> None:
        """All experts are local. fp8, fp8_grad: quantise tokens and gradients where a dispatch does
        not say otherwise.
        """
        super().__init__(LocalTransport(num_experts), fp8, fp8_grad)

    def _send(
        self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms, meanwhile: Meanwhile
    ) -> Dispatched:
        """Tokens that are not quantised are the caller's tensor itself, whose gradient autograd
        knows.
        """
        if forms.tokens:
            return super()._send(x, ids, topk_weights, forms, meanwhile)
        counts = self.transport.dispatch(x, ids, topk_weights, meanwhile).tokens_per_expert
        probs = zero_where_not_here(topk_weights, ids, self.num_experts)
        gradient = SentGradient() if forms.gradients else None
        route = Route(self.transport, None, ids, ids, gradient)
        return Dispatched(x, counts, ids, probs, route, dout_source=route.gradient)
