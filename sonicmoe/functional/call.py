"""One call of the routed expert MLP once its settings are decided: shared by eager autograd and by
compiled graphs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config import SonicMoEConfig, active_config
from ..engine.interface import (
    Engine,
    EngineSettings,
    EngineWeights,
    Saved,
    plain_tokens,
)
from ..engine.select import EngineChoice, announce, announce_emulation, ready_engine
from ..engine.settings import Workload
from ..enums import ActivationParameters, ActivationType, EngineName
from ..errors import ConfigError
from ..gradients.sink import GradientSink
from ..interop import device_name, dtype_name, plain_ops
from ..layouts import WeightLayout
from ..observe import (
    STACKED,
    BackwardBegins,
    BackwardDone,
    ExpertCall,
    ForwardDone,
    emit,
    is_awaited,
)
from ..out_of_memory import raise_with_advice
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
    """

    config: SonicMoEConfig
    settings: EngineSettings
    layout: WeightLayout
    use_fp8: bool | None
    engine: EngineName
    validate: bool
    face: str = STACKED

    def fitted(self, x: Tensor, weights: Weights | EngineWeights) -> Plan:
        """The plan with settings that the engine for these tokens can compute: `auto` falls back
        from FP8 to BF16, out loud.
        """
        # The log line is written here and not in `choose`, which forward and backward ask again.
        choice, device = self._decide(x, weights), device_name(x)
        announce(choice, device)
        announce_emulation(choice, device)
        return (
            self if choice.settings is None else dataclasses.replace(self, settings=choice.settings)
        )

    def choose(self, x: Tensor, weights: Weights | EngineWeights) -> Engine:
        """The engine for these tokens and experts, which may be prepared already."""
        return self._decide(x, weights).engine

    def _decide(self, x: Tensor, weights: Weights | EngineWeights) -> EngineChoice:
        if isinstance(weights, EngineWeights):
            inner, bias = weights.intermediate_size, weights.b1 is not None
        else:
            inner, bias = self.layout.intermediate_size(weights[1]), weights[2] is not None
        workload = Workload(self.settings, int(x.shape[-1]), inner, dtype_name(x.dtype), bias)
        return _choice(device_name(x), self.engine, workload)


@functools.lru_cache(maxsize=256)
def _choice(device: str, engine: EngineName, workload: Workload) -> EngineChoice:
    """Decided once per kind of call: asking for packages and devices takes longer than a launch."""
    return ready_engine(device, engine, workload)


def make_plan(
    activation: ActivationType,
    layout: WeightLayout,
    use_fp8: bool | None,
    parameters: ActivationParameters = (),
    face: str = STACKED,
) -> Plan:
    """The plan under the configuration in force; `use_fp8` True or False overrides its FP8 mode.

    Raises:
        ConfigError: settings that contradict each other; or `use_fp8` is something else.
    """
    check_use_fp8(use_fp8)
    config = active_config()
    resolved = config.resolve()
    # Replaced only where it differs, because a configuration of its own would be resolved anew.
    if use_fp8 is not None and use_fp8 != resolved.fp8:
        config = dataclasses.replace(config, fp8_mode="perf" if use_fp8 else "off")
        resolved = config.resolve()
    settings = EngineSettings.from_config(resolved, activation, parameters)
    validate = resolved.validate_dispatch
    return Plan(config, settings, layout, use_fp8, resolved.engine, validate, face)


def check_use_fp8(use_fp8: object) -> None:
    """Refuse values such as "off" and 0.5, which count as true in Python and would switch FP8 on.

    Raises:
        ConfigError: it is neither a bool nor None.
    """
    if use_fp8 is not None and not isinstance(use_fp8, bool):
        raise ConfigError(f"use_fp8 is {use_fp8!r}; needed: True, False or None")


@dataclass(frozen=True, eq=False, slots=True)
class Origin:
    """Where the experts' tokens and weights come from, for those who observe the call.

    indices: int `[T, K]`; None where the routing that was made of them stands for them.
    lead: the axes of the caller's tokens that are one axis T here; None where unknown.
    first_triple: int `[T]`, of general routing the number of every token's first triple.
    module: whose attributes the weights are; None where unknown.
    """

    indices: Tensor | None = None
    lead: Sequence[int] | None = None
    first_triple: Tensor | None = None
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
    whole = out.new_empty(0)
    with plain_ops():
        whole.set_(out.untyped_storage(), out.storage_offset(), x.shape)  # type: ignore[call-overload]
    return whole


def forward(
    plan: Plan,
    x: Tensor,
    probs: Tensor,
    routing: RoutingMetadata,
    weights: Weights,
    origin: Origin,
    *,
    save: bool,
) -> tuple[Tensor, Saved | None, Reading]:
    """`(out [T, H], what backward needs, weights as the engine read them)`; `routing` is that of
    probs and the indices in `origin`.
    """
    engine = plan.choose(x, weights)
    try:
        reading = read_weights(engine, weights, plan.settings, plan.layout, x.dtype)
        out, saved = engine.forward(x, routing, reading.weights, plan.settings, save=save)
    except Exception as error:
        raise_with_advice(error, "forward", plan.settings, x)
        raise
    # Asked before anything is built, so that a run without observers pays one read of a global.
    if is_awaited():
        call = _described(plan, engine, reading, weights, origin)
        emit(ForwardDone(call, x, probs, out, saved))
    return out, saved, reading


def backward(
    plan: Plan,
    dout: Tensor,
    saved: Saved,
    reading: Reading,
    dtypes: tuple[torch.dtype | None, ...],
    *,
    trained: Sequence[bool],
    given: Weights | None,
    origin: Origin,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """`(dx, dprobs, (dw1, dw2, db1, db2))`; weight gradients are summed in fp32, then rounded once
    to `dtypes`. Those are None that `trained` does not mark.

    given: the caller's weights, for those who observe the call; None where it no longer has them,
        and what the engine made of them stands for them.
    """
    weights = reading.weights
    engine = plan.choose(plain_tokens(saved.x), weights)
    call = _described(plan, engine, reading, given, origin) if is_awaited() else None
    if call is not None:
        emit(BackwardBegins(call, dout, saved))
    try:
        dx, dprobs, gradients = _differentiate(plan, engine, dout, saved, weights, dtypes, trained)
    except Exception as error:
        raise_with_advice(error, "backward", plan.settings, dout)
        raise
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
    if not any(trained):
        dx, dprobs, _ = engine.backward_dx(dout, saved, weights)
        return dx, dprobs, nothing
    # A sink of this backward alone: autograd, and not this package, adds gradients of several calls.
    passed = PassedParameters(plan.settings.activation, plan.layout, weights, dtypes)
    parameters, sink = passed.parameters(), GradientSink(passed)
    wanted = list(trained[: len(parameters)])
    # Memory first: a backward that runs out of it must not have computed anything yet.
    batch = sink.open(engine, plan.settings, parameters, wanted, dout)
    dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
    sink.add(engine, pending, batch)
    return dx, dprobs, (*sink.close(batch), *nothing[len(parameters) :])


def _described(
    plan: Plan, engine: Engine, reading: Reading, weights: Weights | None, origin: Origin
) -> ExpertCall:
    names = zip(("w1", "w2", "b1", "b2"), weights or (), strict=False)
    return ExpertCall(
        engine.name,
        plan.settings,
        origin.indices,
        functools.partial(_native, plan.layout, reading, weights),
        reading.values,
        {name: (weight,) for name, weight in names if weight is not None},
        plan.layout,
        plan.face,
        lead=origin.lead,
        first_triple=origin.first_triple,
        module=origin.module,
    )


def _native(layout: WeightLayout, reading: Reading, weights: Weights | None) -> NativeWeights:
    if weights is None:
        return (*reading.values(), reading.weights.b1, reading.weights.b2)
    w1, w2, b1, b2 = (None if weight is None else weight.detach() for weight in weights)
    assert w1 is not None and w2 is not None
    with plain_ops():
        bias = None if b1 is None else layout.native_b1(b1)
        return layout.native_w1(w1), layout.native_w2(w2), bias, b2
