"""A call of a layer that lives for this call alone: its weights come with it, and autograd gets their
gradients. Eager autograd and the operators of compiled graphs share it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..autograd import refuse_second_derivative
from ..config import ACTIVE
from ..engine.interface import EngineWeights, PendingWgrad, Saved, Tokens
from ..engine.low_rank import NAMES_OF_FACTORS, NO_ADAPTERS, Adapters
from ..gradients.batch import are_writable, fresh_targets
from ..gradients.sink import GradientSink
from ..interop import device_name, is_recomputed, plain_ops
from ..layouts import Codes, GateUp, StackedWeights, weights_of
from ..observe import is_awaited, is_heard
from ..out_of_memory import advising, raise_with_advice
from ..quant.format import BlockScaledTensor
from ..quant.tokens import anchor_of
from ..refusals import need_shape
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from ..weights.cache import Reading
from ..weights.parameters import ExpertParameters
from ..weights.shards import GATHERED, codes_behind
from ..weights.stacked import PassedParameters
from ..weights.stacked_cache import Looked, read_weights
from .call import LayerCall, Named

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor
WEIGHTS = 6  # so many are `flat_weights`
Dtypes = tuple[torch.dtype | None, ...]
_records = functools.lru_cache(maxsize=256)(PassedParameters)  # which hold no tensor


def rows_of(x: Tensor) -> Tensor:
    """The caller's tokens, `[..., H]`, as the experts read them: contiguous `[T, H]`."""
    return (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()


def dtype_of(tokens: Tokens | None) -> torch.dtype:
    """The dtype of the values of these tokens. Codes have bf16 values, because senders quantise bf16."""
    assert tokens is not None
    return torch.bfloat16 if isinstance(tokens, BlockScaledTensor) else tokens.dtype


def in_shape_of(x: Tensor, out: Tensor) -> Tensor:
    """`out [T, H]`, which nobody else holds, with the leading axes of `x [..., H]`. It is no view:
    autograd would have to rewrite the history of a view that the caller writes in place.
    """
    if x.dim() == 2 and not out._is_view():
        return out
    # A tensor of its own over the same memory: a view would have a base, and a copy takes time.
    whole = out.new_empty(0)
    with plain_ops():
        whole.set_(out.untyped_storage(), out.storage_offset(), x.shape)  # type: ignore[call-overload]
    return whole


@dataclass(eq=False, kw_only=True)
class PassedCall(LayerCall):
    """A forward sets `reading`, and each backward makes a call of its own of what autograd kept.

    weights: the caller's; None in a backward that has what the forward read, where nobody observes.
    adapters: beside the weights, in native order.
    module: whose attributes the weights are, for those who observe the call; None where unknown.
    once: the backward of this forward reads the weights anew.
    looked: as of `stacked_cache.look`.
    dtypes: of w1, w2, b1 and b2, in a backward.
    """

    weights: StackedWeights | None
    adapters: Adapters = NO_ADAPTERS
    module: object = None
    once: bool = False
    looked: Looked | None = None
    dtypes: Dtypes = ()

    def forward(
        self, x: Tokens, probs: Tensor | None, *, save: bool
    ) -> tuple[Tensor, Saved | None]:
        """The output of tokens `[..., H]` in their shape, and what a backward needs. Quantised tokens
        are `[T, H]`, of a format that the plan's engine reads.
        """
        plain = None if isinstance(x, BlockScaledTensor) else x
        rows = x if plain is None else rows_of(plain)
        # The configuration of the call, because a graph or a thread of autograd has no other.
        before, looked = ACTIVE.set(self.plan.config), self.looked
        try:
            routing = self.routing(int(rows.shape[0]), probs)
            if looked is not None and looked.binding is not None:
                self.reading = looked.binding.again(routing.held[0])
            if self.reading is None:
                self._read(dtype_of(x), save)
            out, saved = self.compute(rows, probs, routing, save)
        except Exception as error:
            raise_with_advice(error, "forward", self.plan.settings, anchor_of(rows))
            raise
        finally:
            ACTIVE.reset(before)
        return out if plain is None else in_shape_of(plain, out), saved

    def read_ahead(self, dtype: torch.dtype, save: bool, backward: bool) -> Reading:
        """The weights of the pass that comes, before its tokens are there. dtype: of their values."""
        with self.plan.config.activate(), advising("forward", self.plan.settings):
            self._read(dtype, save, backward)
        assert self.reading is not None
        return self.reading

    def routing(self, rows: int, probs: Tensor | None) -> RoutingMetadata:
        """`route`, of counts that fit the weights."""
        weights, routes = self.weights, self.routes
        assert weights is not None and routes is not None
        experts, self.is_sorted = int(weights[1].shape[0]), routes.dim() == 1
        if self.is_sorted:
            need_shape(tuple(routes.shape) == (experts,), "counts", routes, (experts,))
        return self.route(rows, probs, experts)

    def backward(
        self, dout: Tokens, saved: Saved, dtypes: Dtypes, trained: Sequence[bool]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """`(dx [T, H], dprobs, (dw1, dw2, db1, db2))`; weight gradients are summed in fp32, then
        rounded once to `dtypes`. Those are None that `trained` does not mark. Behind them are those
        of the factors of adapters, in fp32, where `trained` marks one.
        """
        dout = dout if isinstance(dout, BlockScaledTensor) else rows_of(dout)
        self.dtypes, before = dtypes, ACTIVE.set(self.plan.config)
        try:
            if self.reading is None:
                self._read(dtype_of(saved.x), save=False, backward=True)
            else:
                self.reading.check_current()
            return self.differentiate(dout, saved, trained)
        except Exception as error:
            raise_with_advice(error, "backward", self.plan.settings, anchor_of(dout))
            raise
        finally:
            ACTIVE.reset(before)

    def _read(self, dtype: torch.dtype, save: bool, backward: bool = False) -> None:
        plan, weights = self.plan, self.weights
        assert weights is not None
        self.reading = read_weights(
            *(plan.chosen, weights, plan.settings, plan.layout, dtype),
            alone=not backward and (not save or is_recomputed()),
            once=self.once and not backward,
            backward=backward,
            looked=self.looked,
            plan=plan,
        )

    def _weights(self) -> EngineWeights:
        assert self.reading is not None
        weights, adapters = self.reading.weights, self.adapters
        return weights if adapters is NO_ADAPTERS else weights.with_adapters(adapters)

    def _gradients(
        self, dout: Tokens, saved: Saved, trained: Sequence[bool]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        weights = self._weights()
        dx, dprobs, pending, gradients = self._add(dout, saved, weights, trained[:4])
        if pending.adapters is not None and any(trained[4:]):
            gradients += pending.adapters()
        return dx, dprobs, gradients

    def _add(
        self, dout: Tokens, saved: Saved, weights: EngineWeights, trained: Sequence[bool]
    ) -> tuple[Tensor, Tensor, PendingWgrad, tuple[Tensor | None, ...]]:
        plan, engine, dtypes = self.plan, self.plan.chosen, self.dtypes
        nothing, place = (None,) * len(dtypes), anchor_of(dout)
        saved.wants_weights, saved.wants_biases = any(trained), any(trained[2:])
        # Frozen experts: the backward ends with dx, and the operands of the others are dropped.
        if not saved.wants_weights:
            return *engine.backward_dx(dout, saved, weights), nothing
        if not saved.wants_biases:
            dtypes = *dtypes[:2], None, None
        passed = _records(plan.settings.activation, plan.layout, weights.native_shapes, dtypes)
        parameters = passed.parameters()
        wanted, rest = list(trained[: len(parameters)]), nothing[len(parameters) :]
        if not any(trained[:2]):  # no product is computed, whatever the engine writes
            dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
            alone = fresh_targets(passed, parameters, wanted, place)
            alone.add_biases(*engine.bias_gradients(pending), split_half=pending.split_half)
            return dx, dprobs, pending, (*alone.of_parameters(len(parameters)), *rest)
        # Asked before `backward_dx`, which runs once: it may free what it reads.
        writes = engine.writes_gradients(plan.settings, device_name(place))
        if writes and are_writable(parameters, wanted):
            dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
            # Only now, when what `backward_dx` needed is free. Memory that runs out here was written
            # by nobody.
            late = engine.frees_dw1_first and _is_long(pending.routing, passed)
            targets = fresh_targets(passed, parameters, wanted, place, late=late)
            # Autograd gets all of it, and nobody else adds there: a sink has nothing to decide.
            engine.backward_dw(pending, targets)
            return dx, dprobs, pending, (*targets.of_parameters(len(parameters)), *rest)
        # A sink of this backward alone, because autograd adds the gradients of several calls.
        sink = GradientSink(passed)
        batch = sink.open(engine, plan.settings, parameters, wanted, place)
        dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
        sink.add(engine, pending, batch)
        return dx, dprobs, pending, (*sink.close(batch), *rest)

    def _left(self, gradients: tuple[Tensor | None, ...]) -> Named:
        named = zip(("dw1", "dw2", "db1", "db2", *NAMES_OF_FACTORS), gradients, strict=False)
        left = [(name, gradient) for name, gradient in named if gradient is not None]
        return lambda: left

    def _native(self) -> NativeWeights:
        # Quantised weights are kept without the tensors that they were made of, so that a backward
        # holds no more than it reads. Codes that FSDP2 gathered have no tensors with values at all,
        # nor have frozen ones.
        weights, reading = self.weights, self.reading
        assert reading is not None
        is_coded = weights is not None and (
            type(weights[0]) is Codes or (GATHERED and codes_behind(weights[1]) is not None)
        )
        if weights is None or is_coded:
            given = (*reading.values(), reading.weights.b1, reading.weights.b2)
        else:
            with plain_ops():
                given = WeightSource.stacked(*weights, layout=self.plan.layout).native()
        return *self.adapters.merged(*given[:2]), *given[2:]

    def _told(self) -> Mapping[str, Any]:
        named = zip(("w1", "w2", "b1", "b2"), self.weights or (), strict=False)
        weights = {
            name: tuple(weight) if isinstance(weight, (Codes, GateUp)) else (weight,)
            for name, weight in named
            if weight is not None
        }
        factors = dict(self.adapters.named)
        return {"weights": weights, "module": self.module, "factors": factors}


def _is_long(routing: RoutingMetadata, layer: ExpertParameters) -> bool:
    """Whether dz `[R, N1]` is so large beside dw2 `[E, H, I]` that it should be freed before dw2's memory
    is taken: a sixteenth of dw2 or more in FP8, an eighth in BF16. A smaller dz saves little memory, and
    taking dw2's memory late costs the host time.
    """
    hidden = layer.native_shapes[0][2]
    return 16 * routing.num_rows >= routing.num_experts * hidden


def keeps_graph() -> bool:
    """Whether the backward that runs may be repeated (`retain_graph`, `create_graph`)."""
    return _graph_is_kept is None or bool(_graph_is_kept())


# Private, and what PyTorch's own compiled backwards ask before they reuse saved memory. Without it
# nothing is reused.
_graph_is_kept: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def halves_of(
    dw1: Tensor | None, gate_wanted: bool, up_wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of gate and up in two tensors: views of `[2, E, I, H]`, each contiguous. Where one
    of the two is wanted alone it is a copy, because a view would keep the memory of both.
    """
    if dw1 is None:
        return None, None
    if gate_wanted and up_wanted:
        return dw1[0], dw1[1]
    return dw1[0].clone() if gate_wanted else None, dw1[1].clone() if up_wanted else None


class PassedFunction(torch.autograd.Function):
    """Arguments: the call, tokens, probabilities, the six `flat_weights`, and the four factors of
    adapters, where there are any. Gradients are summed in fp32 and returned in each weight's dtype;
    those of adapters by PyTorch, which casts them.
    """

    @staticmethod
    def forward(
        ctx: Any, call: PassedCall, x: Tensor, probs: Tensor | None, *tensors: Any
    ) -> Tensor:
        """Run the engine, and keep its tensors through `save_for_backward`."""
        flat, factors = tensors[:WEIGHTS], tensors[WEIGHTS:]
        out, saved = call.forward(x, probs, save=True)
        assert saved is not None
        kept, ctx.spec = saved.pack()
        # FP8 weights are copies of their own. Plain ones are the user's: saving them lets autograd
        # refuse a backward after they were changed in place, and they are prepared again for
        # backward, so that no rearranged copy lives from one pass to the other.
        # Codes of frozen weights are the user's memory as well.
        quantised = call.plan.settings.recipe is not None and flat[3] is None
        ctx.reading = call.reading if quantised else None
        ctx.save_for_backward(*(() if quantised else flat), *factors, *kept)
        ctx.scales = call.adapters.scales if factors else None
        ctx.plan, ctx.shape_of_probs = call.plan, None if probs is None else probs.shape
        # Who observes this forward sees its backward with the user's tensors. Nobody else may keep
        # those alive.
        ctx.observed = call if is_awaited() else None
        ctx.dtypes = tuple([None if w is None else w.dtype for w in (flat[0], flat[2], *flat[4:])])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, probs, w1, its up half, w2, its scales, b1, b2, and of the factors of adapters."""
        refuse_second_derivative()
        tensors = ctx.saved_tensors
        x_wanted, probs_wanted, w1_trained, up_trained, w2_trained, _, *trained = (
            ctx.needs_input_grad[1:]
        )
        trained = [w1_trained or up_trained, w2_trained, *trained]
        seen: PassedCall | None = ctx.observed
        weights = None if seen is None else seen.weights
        # Plain weights come through the saved tensors, whose version autograd has just compared
        # with that of the forward.
        if ctx.reading is None:
            weights, tensors = weights_of(tensors[:WEIGHTS]), tensors[WEIGHTS:]
        adapters = NO_ADAPTERS
        if ctx.scales is not None:
            adapters, tensors = Adapters.of(tensors[:4], ctx.scales), tensors[4:]
        saved = ctx.spec.unpack(tensors)
        # Only z is memory of our own. An observer or a listener may look at it afterwards.
        is_watched = seen is not None or is_awaited() or is_heard()
        saved.donated = not is_watched and not keeps_graph()
        call = PassedCall(
            plan=ctx.plan, reading=ctx.reading, routes=None, weights=weights, adapters=adapters
        )
        if seen is not None:
            call.routes, call.is_sorted, call.module = seen.routes, seen.is_sorted, seen.module
        dx, dprobs, gradients = call.backward(dout, saved, ctx.dtypes, trained)
        # A view of the same shape takes the host as long as an allocation.
        if dx.shape != dout.shape:
            dx = dx.view(dout.shape)
        # Probabilities of rows in expert order have one axis.
        if probs_wanted and dprobs.shape != ctx.shape_of_probs:
            dprobs = dprobs.view(ctx.shape_of_probs)
        of_tokens = dx if x_wanted else None, dprobs if probs_wanted else None
        nothing = (None,) * (len(trained) - len(gradients))
        dw1, dw2, *others = gradients
        halves = halves_of(dw1, w1_trained, up_trained) if ctx.plan.layout.apart else (dw1, None)
        return (None, *of_tokens, *halves, dw2, None, *others, *nothing)
