"""One call of the routed expert MLP once its settings are decided: shared by eager autograd and by
compiled graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..config import ResolvedConfig, SonicMoEConfig, active_config
from ..engine.interface import (
    Engine,
    EngineSettings,
    EngineWeights,
    FreshTargets,
    Saved,
    plain_tokens,
)
from ..engine.select import announce, ready_engine
from ..engine.settings import Workload
from ..enums import ActivationParameters, ActivationType, EngineName
from ..errors import ConfigError
from ..gradients.batch import dtypes_of, late_targets, targets_of_each
from ..gradients.sink import GradientSink
from ..interop import device_name, dtype_name, plain_ops
from ..layouts import WeightLayout, WeightSource
from ..observe import (
    FACES,
    STACKED,
    BackwardBegins,
    BackwardDone,
    ExpertCall,
    ForwardDone,
    emit,
    is_awaited,
)
from ..out_of_memory import advising
from ..refusals import need_shape
from ..routing.build import build_routing, build_sorted_routing
from ..routing.ids import ids_of_sorted
from ..routing.metadata import RoutingMetadata
from ..weights.cache import Reading
from ..weights.stacked import PassedParameters
from ..weights.stacked_cache import Weights, read_weights

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor


@dataclass(frozen=True)
class Plan:
    """Everything static about a call: hashable, fit to be a constant of a compiled graph.

    face: a key of `observe.FACES`, for those who observe the call.
    is_own: made of a configuration of the layer's own, whatever is in force around a call.
    """

    config: SonicMoEConfig
    settings: EngineSettings
    layout: WeightLayout
    use_fp8: bool | None
    engine: EngineName
    validate: bool
    face: str = STACKED
    is_own: bool = False
    _fits: dict[Any, _Fit] = field(init=False, repr=False, compare=False, default_factory=dict)
    _passed: dict[Any, PassedParameters] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def fitted(self, x: Tensor, weights: Weights | EngineWeights) -> Plan:
        """The plan with settings that the engine for these tokens can compute: `auto` falls back
        from FP8 to BF16, out loud.
        """
        return self._fit(x, weights).plan

    def choose(self, x: Tensor, weights: Weights | EngineWeights) -> Engine:
        """The engine for these tokens and experts, which may be prepared already."""
        return self._fit(x, weights).engine

    def _fit(self, x: Tensor, weights: Weights | EngineWeights) -> _Fit:
        if isinstance(weights, EngineWeights):
            inner, bias = weights.intermediate_size, weights.b1 is not None
        else:
            inner, bias = self.layout.intermediate_size(weights[1]), weights[2] is not None
        hidden = int(x.shape[-1])
        # Decided once per kind of call: asking for packages and devices takes longer than a launch,
        # and so does the hash of nested settings.
        kind = x.device, x.dtype, hidden, inner, bias
        found = self._fits.get(kind)
        if found is None:
            device = device_name(x)
            workload = Workload(self.settings, hidden, inner, dtype_name(x.dtype), bias)
            with self.config.activate():
                choice = ready_engine(device, self.engine, workload)
                announce(choice, device)
            settings = choice.settings or self.settings
            found = _Fit(dataclasses.replace(self, settings=settings), choice.engine)
            # The fitted plan is asked for the engine as often as this one is for the plan.
            self._fits[kind] = found.plan._fits[kind] = found
        return found

    def passed(
        self, weights: EngineWeights, dtypes: tuple[torch.dtype | None, ...]
    ) -> PassedParameters:
        """Records of weights in these dtypes, which the engine read as `weights`. They hold no
        tensor, so calls of the same kind share them.
        """
        key = weights.native_shapes, dtypes
        found = self._passed.get(key)
        if found is None:
            found = PassedParameters(self.settings.activation, self.layout, *key)
            self._passed[key] = found
        return found


class _Fit(NamedTuple):
    """A plan that an engine can compute, and the engine."""

    plan: Plan
    engine: Engine


def make_plan(
    activation: ActivationType,
    layout: WeightLayout,
    use_fp8: bool | None,
    parameters: ActivationParameters = (),
    face: str = STACKED,
) -> Plan:
    """The plan under the configuration in force; `use_fp8` True or False overrides its FP8 mode."""
    check_use_fp8(use_fp8)
    config = active_config()
    resolved = config.resolve()
    # By identity: a configuration resolves to the same object until the environment is read again.
    # The plan that is kept beside it holds that object, so no other one can have its id.
    key = id(resolved), activation, layout, use_fp8, parameters, face
    made = _made.get(key)
    if made is None:
        # Replaced only where it differs, because a configuration of its own would be resolved anew.
        of_call = resolved
        if use_fp8 is not None and use_fp8 != resolved.fp8:
            config = dataclasses.replace(config, fp8_mode="perf" if use_fp8 else "off")
            of_call = config.resolve()
        settings = EngineSettings.from_config(of_call, activation, parameters)
        plan = Plan(
            config, settings, layout, use_fp8, of_call.engine, of_call.validate_dispatch, face
        )
        if len(_made) >= MAX_PLANS:
            _made.clear()
        made = _made[key] = resolved, plan
    return made[1]


MAX_PLANS = 256
_made: dict[Any, tuple[ResolvedConfig, Plan]] = {}
_plans: dict[int, Plan] = {}


def number_of(plan: Plan) -> int:
    """The number that stands for `plan` in a compiled graph, which holds tensors and numbers only.

    It is a digest of the plan and not a counter, because the compiler's caches keep graphs beyond
    the process, and another process must give the same plan the same number.
    """
    number = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "big")
    _plans[number] = plan
    return number


def plan_of(number: int) -> Plan:
    """The plan that this process gave the number to; ConfigError where there is none."""
    plan = _plans.get(number)
    if plan is None:
        raise ConfigError(
            f"no plan {number} in this process: a program exported in another one names its "
            "settings by this number and does not carry them; trace the layer once here before "
            "(torch.compile or torch.export), with the same arguments and configuration"
        )
    return plan


def check_use_fp8(use_fp8: object) -> None:
    """Refuse values such as "off" and 0.5, which count as true in Python and would switch FP8 on."""
    # By identity: 1 equals True, and every call asks.
    if not (use_fp8 is None or use_fp8 is True or use_fp8 is False):
        raise ConfigError(f"use_fp8 is {use_fp8!r}; needed: True, False or None")


@dataclass(frozen=True, eq=False, slots=True)
class Origin:
    """Where the experts' tokens and weights come from, for those who observe the call.

    indices: int `[T, K]`, or the counts `[E]` of rows in expert order; None where the routing that
        was made of them stands for them.
    module: whose attributes the weights are; None where unknown.
    """

    indices: Tensor | None = None
    module: object = None


def rows_of(x: Tensor) -> Tensor:
    """The caller's tokens, `[..., H]`, as the experts read them: contiguous `[T, H]`."""
    return (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()


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
    x: Tensor,
    probs: Tensor | None,
    weights: Weights,
    origin: Origin,
    *,
    save: bool,
    static_rows: bool = False,
) -> tuple[Tensor, Saved | None, Reading]:
    """Of tokens `[..., H]` and the indices in `origin`: the output in their shape, what backward
    needs, and the weights as the engine read them.

    static_rows, and probs of None: see `route`.
    """
    rows = rows_of(x)
    # The configuration of the call, because a graph or a thread of autograd has no other.
    with plan.config.activate(), advising("forward", plan.settings, rows):
        sizes = int(rows.shape[0]), int(weights[0].shape[0])
        routing = route(plan, origin, probs, sizes, static_rows=static_rows)
        engine = plan.choose(rows, weights)
        reading = read_weights(engine, weights, plan.settings, plan.layout, x.dtype)
        out, saved = engine.forward(rows, routing, reading.weights, plan.settings, save=save)
        # Asked before anything is built, so that a run without observers pays one read of a global.
        if is_awaited():
            origin, probs = _in_slots(origin, probs, sizes[0])
            call = _described(plan, engine, reading, weights, origin)
            emit(ForwardDone(call, rows, probs, out, saved))
    return in_shape_of(x, out), saved, reading


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
        origin = Origin(ids_of_sorted(counts, tokens), origin.module)
        probs = probs if probs is not None else torch.ones(tokens, device=counts.device)
        probs = probs.reshape(tokens, 1)
    assert probs is not None
    return origin, probs


def backward(
    plan: Plan,
    dout: Tensor,
    saved: Saved,
    reading: Reading | None,
    dtypes: tuple[torch.dtype | None, ...],
    *,
    trained: Sequence[bool],
    given: Weights | None,
    origin: Origin,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """`(dx [T, H], dprobs, (dw1, dw2, db1, db2))`; weight gradients are summed in fp32, then
    rounded once to `dtypes`. Those are None that `trained` does not mark.

    reading: the weights as the forward read them; None: they are read again from `given`.
    given: the caller's weights. Where `reading` is there they are for those who observe the call,
        and what the engine made of them may stand for them.
    """
    dout, tokens = rows_of(dout), plain_tokens(saved.x)
    with plan.config.activate(), advising("backward", plan.settings, dout):
        if reading is None:
            assert given is not None
            engine = plan.choose(tokens, given)
            reading = read_weights(engine, given, plan.settings, plan.layout, tokens.dtype)
        else:
            engine = plan.choose(tokens, reading.weights)
            reading.check_current()
        call = None
        if is_awaited():
            # The routing stands for the counts.
            is_sorted = origin.indices is not None and origin.indices.dim() == 1
            origin = Origin(None, origin.module) if is_sorted else origin
            call = _described(plan, engine, reading, given, origin)
            emit(BackwardBegins(call, dout, saved))
        dx, dprobs, gradients = _differentiate(
            plan, engine, dout, saved, reading.weights, dtypes, trained
        )
        if call is not None:
            named = zip(("dw1", "dw2", "db1", "db2"), gradients, strict=True)
            left = [(name, gradient) for name, gradient in named if gradient is not None]
            emit(BackwardDone(call, dx, dprobs, lambda: left))
    return dx, dprobs, gradients


def _differentiate(
    plan: Plan,
    engine: Engine,
    dout: Tensor,
    saved: Saved,
    weights: EngineWeights,
    dtypes: tuple[torch.dtype | None, ...],
    trained: Sequence[bool],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    nothing = (None,) * len(dtypes)
    # Frozen experts: the backward ends with dx, and the operands of the others are dropped.
    if not any(trained):
        dx, dprobs, _ = engine.backward_dx(dout, saved, weights)
        return dx, dprobs, nothing
    passed = plan.passed(weights, dtypes)
    parameters = passed.parameters()
    wanted, rest = list(trained[: len(parameters)]), nothing[len(parameters) :]
    # Asked before `backward_dx`, which runs once: it may free what it reads.
    writes = engine.writes_gradients(plan.settings, device_name(dout))
    if writes and FreshTargets.fits(dtypes_of(parameters, wanted)):
        dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
        # Only now, when what `backward_dx` needed is free. Memory that runs out here was written by
        # nobody.
        make = late_targets if engine.frees_dw1_first else targets_of_each
        targets = make(passed, parameters, wanted, dout)
        # Autograd gets all of it, and nobody else adds there: a sink has nothing to decide.
        engine.backward_dw(pending, targets)
        return dx, dprobs, (*targets.of_parameters(len(parameters)), *rest)
    # A sink of this backward alone, because autograd adds the gradients of several calls.
    sink = GradientSink(passed)
    batch = sink.open(engine, plan.settings, parameters, wanted, dout)
    dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
    sink.add(engine, pending, batch)
    return dx, dprobs, (*sink.close(batch), *rest)


def _described(
    plan: Plan, engine: Engine, reading: Reading, weights: Weights | None, origin: Origin
) -> ExpertCall:
    # Bound and not called: an observer that looks at no weight pays for no copy.
    names = zip(("w1", "w2", "b1", "b2"), weights or (), strict=False)
    return ExpertCall(
        engine.name,
        plan.settings,
        origin.indices,
        functools.partial(_native, plan.layout, reading, weights),
        reading.values,
        {name: (weight,) for name, weight in names if weight is not None},
        plan.face,
        module=origin.module,
    )


def _native(layout: WeightLayout, reading: Reading, weights: Weights | None) -> NativeWeights:
    # Quantised weights are kept without the tensors that they were made of, so that a backward
    # holds no more than it reads.
    if weights is None:
        return (*reading.values(), reading.weights.b1, reading.weights.b2)
    with plain_ops():
        return WeightSource.stacked(*weights, layout=layout).native()
