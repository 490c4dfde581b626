"""One call of the routed expert MLP once its settings are decided: shared by eager autograd and by
compiled graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..engine.interface import (
    Engine,
    EngineWeights,
    PendingWgrad,
    Saved,
    Tokens,
)
from ..engine.low_rank import NAMES_OF_FACTORS, NO_ADAPTERS, Adapters
from ..gradients.batch import are_writable, fresh_targets
from ..gradients.sink import GradientSink
from ..interop import device_name, is_recomputed, plain_ops
from ..layouts import Codes, GateUp, WeightLayout
from ..observe import (
    FACES,
    BackwardBegins,
    BackwardDone,
    ExpertCall,
    ForwardDone,
    emit,
    is_awaited,
)
from ..out_of_memory import raise_with_advice
from ..quant.format import BlockScaledTensor
from ..quant.tokens import anchor_of
from ..refusals import need_shape
from ..routing.build import build_routing, build_sorted_routing
from ..routing.ids import ids_of_sorted
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from ..weights.cache import Reading
from ..weights.parameters import ExpertParameters
from ..weights.shards import GATHERED, codes_behind
from ..weights.stacked_cache import Weights, read_weights
from .plan import Plan

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Origin:
    """Where the experts' tokens and weights come from.

    indices: int `[T, K]`, or the counts `[E]` of rows in expert order; None where the routing that
        was made of them stands for them.
    module: whose attributes the weights are, for those who observe the call; None where unknown.
    adapters: beside the weights, in native order.
    tokens_per_expert: as of `build_routing`; None where the host does not know them.
    """

    indices: Tensor | None = None
    module: object = None
    adapters: Adapters = NO_ADAPTERS
    tokens_per_expert: list[int] | None = None


NOWHERE = Origin()


def rows_of(x: Tensor) -> Tensor:
    """The caller's tokens, `[..., H]`, as the experts read them: contiguous `[T, H]`."""
    return (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()


def dtype_of(tokens: Tokens | None) -> torch.dtype:
    """Of the values that they stand for: senders quantise bf16."""
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


def forward(
    plan: Plan,
    x: Tokens,
    probs: Tensor | None,
    weights: Weights,
    origin: Origin,
    *,
    save: bool,
    static_rows: bool = False,
    once: bool = False,
) -> tuple[Tensor, Saved | None, Reading]:
    """Of tokens `[..., H]` and the indices in `origin`: the output in their shape, what backward
    needs, and the weights as the engine read them, without the adapters. Quantised tokens are
    `[T, H]`, of a format that the plan's engine reads.

    static_rows, and probs of None: see `route`. once: the caller does not keep the reading.
    """
    rows = x if isinstance(x, BlockScaledTensor) else rows_of(x)
    # The configuration of the call, because a graph or a thread of autograd has no other.
    with plan.config.activate():
        try:
            sizes = int(rows.shape[0]), int(weights[1].shape[0])
            routing = route(plan, origin, probs, sizes, static_rows=static_rows)
            engine = plan.choose()
            given = weights, plan.settings, plan.layout, dtype_of(x)
            reading = read_weights(engine, *given, not save or is_recomputed(), once)
            read = reading.weights.with_adapters(origin.adapters)
            out, saved = engine.forward(rows, routing, read, plan.settings, save=save)
            # Asked before anything is built: a run without observers pays one read of a global.
            if is_awaited():
                origin, probs = _in_slots(origin, probs, sizes[0])
                call = _described(plan, engine, reading, weights, origin)
                emit(ForwardDone(call, rows, probs, out, saved))
        except Exception as error:
            raise_with_advice(error, "forward", plan.settings, anchor_of(rows))
            raise
    return out if isinstance(x, BlockScaledTensor) else in_shape_of(x, out), saved, reading


def route(
    plan: Plan,
    origin: Origin,
    probs: Tensor | None,
    sizes: tuple[int, int],
    *,
    static_rows: bool = False,
) -> RoutingMetadata:
    """As `build_routing`, whose messages then name the face's arguments, or `build_sorted_routing`
    of counts. sizes: T and E. probs: None where the caller multiplies rows in expert order himself.
    """
    (tokens, experts), routes = sizes, origin.indices
    assert routes is not None
    alignment, validate = plan.settings.row_alignment, plan.validate
    if routes.dim() == 1:
        need_shape(tuple(routes.shape) == (experts,), "counts", routes, (experts,))
        return build_sorted_routing(
            *(routes, tokens, probs),
            alignment=alignment,
            validate=validate,
            static_rows=static_rows,
        )
    assert probs is not None
    face = FACES[plan.face]
    return build_routing(
        routes,
        probs,
        experts,
        origin.tokens_per_expert,
        alignment=alignment,
        validate=validate,
        static_rows=static_rows,
        names=(face.indices, face.scores),
    )


def _in_slots(origin: Origin, probs: Tensor | None, tokens: int) -> tuple[Origin, Tensor]:
    """Indices and probabilities `[T, 1]` of rows in expert order, for those who observe the call;
    others as they are.
    """
    counts = origin.indices
    if counts is not None and counts.dim() == 1:
        origin = replace(origin, indices=ids_of_sorted(counts, tokens))
        probs = probs if probs is not None else torch.ones(tokens, device=counts.device)
        probs = probs.reshape(tokens, 1)
    assert probs is not None
    return origin, probs


def backward(
    plan: Plan,
    dout: Tokens,
    saved: Saved,
    reading: Reading | None,
    dtypes: tuple[torch.dtype | None, ...],
    *,
    trained: Sequence[bool],
    given: Weights | None,
    origin: Origin,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """`(dx [T, H], dprobs, (dw1, dw2, db1, db2))`; weight gradients are summed in fp32, then
    rounded once to `dtypes`. Those are None that `trained` does not mark. Behind them are those of
    the factors of adapters, in fp32, where `trained` marks one.

    reading: the weights as the forward read them; None: they are read again from `given`.
    given: the caller's weights. Where `reading` is there they are for those who observe the call,
        and what the engine made of them may stand for them.
    """
    dout = dout if isinstance(dout, BlockScaledTensor) else rows_of(dout)
    with plan.config.activate():
        try:
            engine, call = plan.choose(), None
            if reading is None:
                assert given is not None
                dtype = dtype_of(saved.x)
                how = plan.settings, plan.layout, dtype
                reading = read_weights(engine, given, *how, backward=True)
            else:
                reading.check_current()
            if is_awaited():
                # The routing stands for the counts.
                is_sorted = origin.indices is not None and origin.indices.dim() == 1
                origin = replace(origin, indices=None) if is_sorted else origin
                call = _described(plan, engine, reading, given, origin)
                emit(BackwardBegins(call, dout, saved))
            read = reading.weights.with_adapters(origin.adapters)
            dx, dprobs, pending, gradients = _differentiate(
                plan, engine, dout, saved, read, dtypes, trained[:4]
            )
            if pending.adapters is not None and any(trained[4:]):
                gradients += pending.adapters()
            if call is not None:
                named = zip(
                    ("dw1", "dw2", "db1", "db2", *NAMES_OF_FACTORS), gradients, strict=False
                )
                left = [(name, gradient) for name, gradient in named if gradient is not None]
                emit(BackwardDone(call, dx, dprobs, lambda: left))
        except Exception as error:
            raise_with_advice(error, "backward", plan.settings, anchor_of(dout))
            raise
    return dx, dprobs, gradients


def _differentiate(
    plan: Plan,
    engine: Engine,
    dout: Tokens,
    saved: Saved,
    weights: EngineWeights,
    dtypes: tuple[torch.dtype | None, ...],
    trained: Sequence[bool],
) -> tuple[Tensor, Tensor, PendingWgrad, tuple[Tensor | None, ...]]:
    nothing, place = (None,) * len(dtypes), anchor_of(dout)
    saved.wants_weights, saved.wants_biases = any(trained), any(trained[2:])
    # Frozen experts: the backward ends with dx, and the operands of the others are dropped.
    if not saved.wants_weights:
        return *engine.backward_dx(dout, saved, weights), nothing
    if not saved.wants_biases:
        dtypes = *dtypes[:2], None, None
    passed = plan.passed(weights, dtypes)
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
        # Only now, when what `backward_dx` needed is free. Memory that runs out here was written by
        # nobody.
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


def _is_long(routing: RoutingMetadata, layer: ExpertParameters) -> bool:
    """Whether dz `[R, N1]` is so large beside dw2 `[E, H, I]` that it should be freed before dw2's memory
    is taken: a sixteenth of dw2 or more in FP8, an eighth in BF16. A smaller dz saves little memory, and
    taking dw2's memory late costs the host time.
    """
    hidden = layer.native_shapes()[0][2]
    return 16 * routing.num_rows >= routing.num_experts * hidden


def _described(
    plan: Plan, engine: Engine, reading: Reading, weights: Weights | None, origin: Origin
) -> ExpertCall:
    # Bound and not called: an observer that looks at no weight pays for no copy.
    names = zip(("w1", "w2", "b1", "b2"), weights or (), strict=False)
    return ExpertCall(
        engine.name,
        plan.settings,
        origin.indices,
        functools.partial(_native, plan.layout, reading, weights, origin.adapters),
        reading.values,
        {
            name: tuple(weight) if isinstance(weight, (Codes, GateUp)) else (weight,)
            for name, weight in names
            if weight is not None
        },
        plan.face,
        module=origin.module,
        factors=dict(origin.adapters.named),
    )


def _native(
    layout: WeightLayout, reading: Reading, weights: Weights | None, adapters: Adapters
) -> NativeWeights:
    # Quantised weights are kept without the tensors that they were made of, so that a backward
    # holds no more than it reads. Codes that FSDP2 gathered have no tensors with values at all, nor
    # have frozen ones.
    is_coded = weights is not None and (
        type(weights[0]) is Codes or (GATHERED and codes_behind(weights[1]) is not None)
    )
    if weights is None or is_coded:
        given = (*reading.values(), reading.weights.b1, reading.weights.b2)
    else:
        with plain_ops():
            given = WeightSource.stacked(*weights, layout=layout).native()
    return *adapters.merged(*given[:2]), *given[2:]
