"""The routed path over ranks as `torch.library` operators: dispatch; experts and combine; and their
backward. A graph that holds them sees tokens go in and tokens come out.

How many rows a rank receives depends on data, and no graph can hold a tensor of such a size. So a
dispatch keeps what arrives by itself, and returns a *ticket*: one number on the host, in memory that
owns what was kept. Whoever may run the backward holds the ticket: autograd, a compiled graph between
its two halves, selective checkpointing. Where it is dropped, as by full activation checkpointing,
everything that was kept goes with it.

They are two operators because a backward needs the rows and not the output. A compiled graph that
computes a block again leaves the second one out, and the backward computes z from the rows.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..autograd import refuse_second_derivative
from ..distributed_utils import dispatcher_of
from ..engine.capabilities import format_problem
from ..engine.interface import Saved, Tokens, token_format
from ..engine.select import announce_values
from ..ep import Dispatched, Dispatcher
from ..ep.interface import Transport
from ..errors import ConfigError, SonicMoEError, expect
from ..interop import device_name, in_backward
from ..layer.arrivals import gradient_from
from ..layer.passed_call import PassedCall, keeps_graph
from ..layer.plan import Plan, plan_of
from ..layouts import StackedWeights, flat_weights, weights_of
from ..observe import is_awaited, is_heard
from ..quant.tokens import checked_tokens, to_bfloat16
from ..weights.cache import Reading
from ..weights.shards import codes_behind
from .autograd import is_differentiated

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class ExpertGroup:
    """The ranks that hold the experts of a layer, and how rows travel between them.

    num_experts: of the whole group. group: process group; None is one rank. options: of
    `make_dispatcher`. Where the host does not wait for counts, and no `max_tokens` is among them, all
    ranks dispatch as many tokens.
    """

    num_experts: int
    group: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def dispatcher(self, tokens: int) -> Dispatcher:
        """The dispatcher of all layers. It has room for `max_tokens` of every rank, else for so many."""
        options = dict(self.options)
        bound = options.pop("max_tokens", tokens)
        waits = options.pop("wait_for_counts", True)
        return dispatcher_of(self.num_experts, self.group, None if waits else bound, **options)


_groups: dict[str, ExpertGroup] = {}


def name_of(group: ExpertGroup) -> str:
    """The name that stands for `group` in compiled graphs, which may come from another process's cache."""
    ranks = "" if group.group is None else group.group.group_name
    name = f"{group.num_experts} experts, group {ranks!r}, {sorted(group.options.items())}"
    _groups[name] = group
    return name


def routed_mlp(
    plan_number: int, group: str, x: Tensor, indices: Tensor, probs: Tensor, weights: StackedWeights
) -> Tensor:
    """Every token of this rank through its experts, wherever they are. All ranks of the group call
    it, in one order, and all run its backward or none.

    Args:
        plan_number: of the plan, which must be the layer's own.
        group: `name_of` an `ExpertGroup`.
        x: `[T, H]`.
        indices: int64 `[T, K]`, ids of the whole group (docs/design.md, "Routing contract").
        probs: fp32 `[T, K]`.
        weights: of this rank's experts, in native layout.

    Returns:
        `[T, H]`, the weighted sum over the experts of all ranks, differentiable in all but indices.
    """
    w1, w1_up, w2, scales, b1, b2 = flat_weights(weights)
    assert w1_up is None and scales is None
    given = w1, w2, b1, b2
    save = is_differentiated(x, probs, given)
    numbers = plan_number, save
    # The weights go in undetached, because their codes are kept with the parameter and found by it.
    ticket = _routed_dispatch(x.detach(), indices, probs.detach(), *given, group, *numbers)
    out: Tensor = _routed_mlp(ticket, x, probs, *given, *numbers)
    return out if save else out.detach()  # the operator is differentiable, whatever it saved


class _Kept(bytearray):
    """What one dispatch keeps. It is the memory of its ticket, and lives as long."""

    dispatcher: Dispatcher
    tokens: Dispatched
    saved: Saved | None = None  # by the experts, for their backward
    reading: Reading | None = None  # the weights of the experts' next pass

    def __init__(self, number: int) -> None:
        super().__init__(number.to_bytes(8, "little"))


_numbers = itertools.count()
_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def _kept_of(ticket: Tensor) -> _Kept:
    kept = _kept.get(int(ticket))
    words = (
        "a routed path's backward found nothing of its forward: the ticket, whose memory owns it, "
    )
    expect(kept is not None, ConfigError, f"{words}was copied or moved, and the original is gone")
    assert kept is not None
    return kept


@torch.library.custom_op("sonicmoe::routed_dispatch", mutates_args=())
def _routed_dispatch(
    x: Tensor,
    indices: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    group: str,
    plan_number: int,
    save: bool,
) -> Tensor:
    """The ticket, int64 `[1]`. The weights, which the experts read next, are prepared here, because the
    host has nothing else to do while counts travel, and the GPU waits for all that it does behind them.
    """
    expert_group, number = _groups.get(group), next(_numbers)
    words = (
        f"no group of experts {group!r} in this process; needed: a model that was parallelised here"
    )
    expect(expert_group is not None, ConfigError, words)
    assert expert_group is not None
    kept = _kept[number] = _Kept(number)
    with torch.no_grad():
        kept.dispatcher = expert_group.dispatcher(int(x.shape[0]))
        # Where nothing travels, the rows would be the caller's tokens, which he may write.
        x = x.contiguous() if kept.dispatcher.transport.moves else x.clone()

        def read() -> None:
            if codes_behind(w1) is not None:
                return  # nothing is made of them, and each pass has an order of its own
            weights = weights_of((w1, None, w2, None, b1, b2))
            plan = plan_of(plan_number).fitted_to(x, weights)
            call = PassedCall(plan=plan, weights=weights, routes=None, once=True)
            # A dispatch in a backward is computed again, for the backward that comes next.
            dtype = torch.bfloat16 if kept.dispatcher.fp8 else x.dtype
            kept.reading = call.read_ahead(dtype, save, backward=in_backward())

        kept.tokens = kept.dispatcher.dispatch(x, indices, probs, meanwhile=read)
    return torch.frombuffer(kept, dtype=torch.int64)


@_routed_dispatch.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("sonicmoe::routed_mlp", mutates_args=())
def _routed_mlp(
    ticket: Tensor,
    x: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    plan_number: int,
    save: bool,
) -> Tensor:
    """`[T, H]`; x and probs, which have been dispatched, get gradients."""
    weights, kept = weights_of((w1, None, w2, None, b1, b2)), _kept_of(ticket)
    # The compiler may take two dispatches of the same tensors for one.
    words = "two layers of experts took one dispatch, of the same tokens, ids and probabilities"
    expect(
        kept.saved is None or in_backward(), ConfigError, f"{words}; needed: tensors of their own"
    )
    with torch.no_grad():
        plan = plan_of(plan_number).fitted_to(x, weights)
        call = _call(kept, plan, weights)
        out, kept.saved = call.forward(_rows(kept.tokens, plan), kept.tokens.probs, save=save)
        # A forward inside a backward runs for the second time, and its own backward is the next to
        # come. Codes of the weights are kept until then, and else not: they would live for a pass.
        is_next = save and plan.settings.recipe is not None and in_backward()
        kept.reading = call.reading if is_next else None
        return kept.dispatcher.combine(out, kept.tokens.handle)


def _call(kept: _Kept, plan: Plan, weights: StackedWeights) -> PassedCall:
    tokens = kept.tokens
    routed: Any = {"routes": tokens.indices, "tokens_per_expert": tokens.tokens_per_expert}
    return PassedCall(plan=plan, weights=weights, once=True, reading=kept.reading, **routed)


def _rows(tokens: Dispatched, plan: Plan) -> Tokens:
    """What the engine reads of the tokens that came."""
    if tokens.x_scale is None:
        return tokens.x
    rows, engine = checked_tokens(tokens.x, tokens.x_scale), plan.chosen
    reason = format_problem(engine.record, plan.settings, token_format(rows))
    if reason is None:
        return rows
    announce_values("tokens", engine.name, device_name(rows.codes), reason)
    return to_bfloat16(rows)


@_routed_mlp.register_fake
def _(ticket: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("sonicmoe::routed_mlp_backward", mutates_args=())
def _routed_mlp_backward(
    dout: Tensor,
    ticket: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    topk: int,
    plan_number: int,
    trains_weights: bool,
    trains_biases: bool,
) -> list[Tensor]:
    """`dx, dprobs [T, topk], dw1, dw2, db1, db2`; empty where not wanted."""
    kept, given = _kept_of(ticket), (w1, w2, b1, b2)
    trained = [trains_weights] * 2 + [trains_biases] * 2
    trained = [trains and w is not None for trains, w in zip(trained, given, strict=True)]
    weights = weights_of((w1, None, w2, None, b1, b2))
    plan = plan_of(plan_number)
    plan = (plan if kept.saved is not None else without_z(plan)).fitted_to(dout, weights)
    routes, source = kept.tokens.handle, kept.tokens.dout_source
    with torch.no_grad(), _explaining(kept.dispatcher.transport):
        call = _call(kept, plan, weights)
        saved = _saved(kept, call)
        rows: Tokens = routes.combine_backward(dout)
        if source is not None:
            assert isinstance(rows, torch.Tensor)
            rows = gradient_from(source, rows, plan.chosen, plan.settings)
        call.routes = None
        dtypes = tuple(None if weight is None else weight.dtype for weight in given)
        dx, dprobs, gradients = call.backward(rows, saved, dtypes, trained)
        dx, dprobs = routes.dispatch_backward(dx, dprobs)
    nothing = dout.new_empty(0)
    pairs = zip(gradients, given, strict=True)
    left = [
        nothing.clone() if g is None or w is None else g.to(w.dtype).contiguous() for g, w in pairs
    ]
    return [dx.to(dout.dtype), dprobs, *left]


@_routed_mlp_backward.register_fake
def _(dout: Tensor, ticket: Tensor, *arguments: Any) -> list[Tensor]:
    *given, topk, _, trains_weights, trains_biases = arguments
    wanted = [trains_weights] * 2 + [trains_biases] * 2
    pairs = zip(given, wanted, strict=True)
    left = [
        w.new_empty(w.shape) if trains and w is not None else dout.new_empty(0)
        for w, trains in pairs
    ]
    dprobs = dout.new_empty((dout.shape[0], topk), dtype=torch.float32)
    return [dout.new_empty(dout.shape), dprobs, *left]


def _saved(kept: _Kept, call: PassedCall) -> Saved:
    """What the experts saved; the rows alone where their forward was left out."""
    if kept.saved is None:
        tokens, plan = kept.tokens, call.plan
        with plan.config.activate():
            routing = call.routing(int(tokens.indices.shape[0]), tokens.probs)
        return Saved(plan.settings, routing, _rows(tokens, plan), None)
    # The memory of z is the engine's, unless somebody looks at it afterwards, or runs this again.
    donated = not (is_awaited() or is_heard() or keeps_graph())
    saved = kept.saved if donated else copy.copy(kept.saved)
    saved.donated = donated
    return saved


@functools.cache
def without_z(plan: Plan) -> Plan:
    """The plan of a backward that computes z again."""
    return replace(plan, settings=replace(plan.settings, recompute_z=True))


@contextmanager
def _explaining(transport: Transport) -> Iterator[None]:
    """Name the operation in which a rank was lost."""
    try:
        yield
    except SonicMoEError:
        raise
    except Exception as error:
        transport.explain(error, "backward of the routed path")
        raise


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.topk, ctx.plan_number = inputs[2].shape[1], inputs[7]
    ctx.save_for_backward(inputs[0], *inputs[3:7])


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    # A gradient that did not arrive counts as zeros: collectives run on every rank or on none.
    refuse_second_derivative()
    wanted = ctx.needs_input_grad[1:7]
    trained = any(wanted[2:4]), any(wanted[4:])
    numbers = ctx.topk, ctx.plan_number
    gradients = _routed_mlp_backward(dout, *ctx.saved_tensors, *numbers, *trained)
    kept = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return None, *kept, None, None


_routed_mlp.register_autograd(_differentiate, setup_context=_setup_context)
