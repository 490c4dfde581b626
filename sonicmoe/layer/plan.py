"""The plan of a call of a layer of experts: its settings, and the engine for each kind of tokens. It
is made once and kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..config import ResolvedConfig, SonicMoEConfig, active_config
from ..engine.interface import Engine, EngineSettings
from ..engine.select import EngineChoice, announce, choose_engine, ready_engine
from ..engine.settings import TokenFormat, Workload
from ..enums import ActivationParameters, ActivationType, EngineName, FirstBackward
from ..errors import ConfigError, expect
from ..interop import device_name, dtype_name
from ..layouts import NATIVE, StackedWeights, WeightLayout
from ..observe import NODE, STACKED

Tensor = torch.Tensor


class Kind(NamedTuple):
    """What else decides which engine computes a call: the device by name, the dtype that the tokens
    stand for, H, I, whether there are biases and low-rank adapters, and how the tokens come.
    """

    device: str
    dtype: torch.dtype
    hidden: int
    inner: int
    bias: bool = False
    low_rank: bool = False
    tokens: TokenFormat = TokenFormat.PLAIN


_NOT_CHOSEN: Any = None


@dataclass(frozen=True)
class Plan:
    """Everything static about a call: hashable, fit to be a constant of a compiled graph.

    config: activated in both passes, so that kernels come from its cache directory. A backward may
        run on another thread, and after the caller's `activate()` block has ended.
    engine: the name that was asked for.
    face: a key of `observe.FACES`, for those who observe the call.
    first_backward: whether the first backward of a step adds gradients or writes them.
    is_own: made of a configuration of the layer's own, whatever is in force around a call.
    separate: each expert has weights of its own.
    dequantises: of a fitted plan: the engine is handed the values of tokens that arrived in FP8.
    chosen: the engine of a fitted plan.
    """

    config: SonicMoEConfig
    settings: EngineSettings
    layout: WeightLayout
    use_fp8: bool | None
    engine: EngineName
    validate: bool
    face: str = STACKED
    first_backward: FirstBackward = FirstBackward.ADD
    is_own: bool = False
    separate: bool = False
    dequantises: bool = field(init=False, repr=False, compare=False, default=False)
    chosen: Engine = field(init=False, repr=False, compare=False, default=_NOT_CHOSEN)

    @classmethod
    def of(
        cls,
        config: SonicMoEConfig,
        activation: ActivationType,
        parameters: ActivationParameters,
        layout: WeightLayout,
        use_fp8: bool | None,
        face: str,
        separate: bool = False,
    ) -> Plan:
        """The plan of a layer under a configuration; nothing is chosen yet."""
        resolved = config.resolve()
        settings = EngineSettings.from_config(resolved, activation, parameters)
        decided = resolved.engine, resolved.validate_dispatch, face, resolved.first_backward
        return cls(config, settings, layout, use_fp8, *decided, separate=separate)

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Any, ...]]:
        """What it was made of: a copy chooses its engine, and is known by its number, where it is."""
        fields = (f.name for f in dataclasses.fields(self) if f.init)
        return _known, tuple(getattr(self, name) for name in fields)

    def fitted(self, kind: Kind) -> Plan:
        """The plan with settings that the engine for calls of this kind can compute: `auto` falls
        back from FP8 to BF16, out loud. An engine that was asked for by name and cannot run raises.
        """
        return _fitted((id(self), kind), self, lambda: (self, kind))

    def fitted_to(self, x: Tensor, weights: StackedWeights, low_rank: bool = False) -> Plan:
        """`fitted` to plain tokens `[..., H]` and stacked weights."""
        return self.fitted(self.kind_of(x, weights, low_rank))

    def kind_of(self, x: Tensor, weights: StackedWeights, low_rank: bool = False) -> Kind:
        """The kind of a call of plain tokens `[..., H]` and stacked weights."""
        inner, bias = self.layout.intermediate_size(weights[1]), weights[2] is not None
        return Kind(device_name(x), x.dtype, int(x.shape[-1]), inner, bias, low_rank)

    def foretell(self, kind: Kind) -> EngineChoice:
        """Log what `fitted` logs, and raise what it raises, but compile nothing."""
        with self.config.activate():
            choice = choose_engine(kind.device, self.engine, self.workload(kind))
            announce(choice, kind.device)
        return choice

    def workload(self, kind: Kind) -> Workload:
        """What a call of this kind asks of an engine."""
        _, dtype, hidden, inner, bias, low_rank, tokens = kind
        of_tokens = dtype_name(dtype), bias, self.separate, tokens, low_rank
        return Workload(self.settings, hidden, inner, *of_tokens)


class OwnPlan:
    """The plan of one layer that lives from call to call, under the configuration in force at each.

    config: the layer's own; None where it follows the one in force.
    """

    def __init__(
        self,
        config: SonicMoEConfig | None,
        activation: ActivationType,
        parameters: ActivationParameters,
        sizes: tuple[int, int],
        separate: bool = False,
        face: str = NODE,
    ) -> None:
        """Nothing is chosen yet; `sizes`: H and I; `separate`, `face`: as in `Plan`."""
        self.config = config
        self._layer, self._sizes = (activation, parameters), sizes
        self._separate, self._face = separate, face

    def __reduce__(self) -> tuple[type[OwnPlan], tuple[Any, ...]]:
        """A copy chooses by itself: it may be loaded where other engines can run."""
        return OwnPlan, (self.config, *self._layer, self._sizes, self._separate, self._face)

    def in_force(self) -> Plan:
        """The plan under the configuration in force for the layer."""
        of_layer = *self._layer, NATIVE, None, self._face, self._separate
        return Plan.of(self.in_scope(), *of_layer)

    def fitted(
        self,
        x: Tensor,
        dtype: torch.dtype,
        tokens: TokenFormat = TokenFormat.PLAIN,
        bias: bool = False,
        low_rank: bool = False,
    ) -> Plan:
        """`Plan.fitted` to a call on the device of x; `dtype`: that its tokens stand for."""
        resolved = self.in_scope().resolve()
        kind = Kind(device_name(x), dtype, *self._sizes, bias, low_rank, tokens)
        asked = id(resolved), self._layer, self._separate, self._face
        return _fitted((asked, kind), resolved, lambda: (self.in_force(), kind))

    def fitted_to_weight(self, weight: Tensor) -> Plan:
        """The plan of a layer that no tokens have reached yet, fitted to the device of a weight."""
        with self.scope():
            return self.fitted(weight, dtype_beside(weight))

    def scope(self) -> AbstractContextManager[SonicMoEConfig]:
        """The layer's configuration in force: its cache directories and its ban on compiling hold
        for every kernel it loads.
        """
        return self.in_scope().activate()

    def in_scope(self) -> SonicMoEConfig:
        """The configuration that `scope` puts in force."""
        return self.config or active_config()


def dtype_beside(weight: Tensor) -> torch.dtype:
    """The dtype that tokens will have as a rule: bfloat16 beside fp32 master weights."""
    return torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype


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
    if use_fp8 is not None and use_fp8 != config.resolve().fp8:
        config = dataclasses.replace(config, fp8_mode="perf" if use_fp8 else "off")
    plan = Plan.of(config, activation, parameters, layout, use_fp8, face)
    expect(
        plan.first_backward is FirstBackward.ADD,
        ConfigError,
        "first_backward='overwrite' writes main_grad, and here autograd adds the gradients of "
        "the weights to .grad; needed: 'add', or a SonicMoEMlpNode",
    )
    return plan


def plan_for(
    resolved: ResolvedConfig,
    x: Tensor,
    weights: StackedWeights,
    low_rank: bool,
    activation: ActivationType,
    layout: WeightLayout,
    use_fp8: bool | None,
    *of_layer: Any,
) -> Plan:
    """`make_plan`, fitted to a call. It is kept for calls of the same kind, because every call of
    weights of which nothing is kept asks. resolved: the configuration in force.
    """
    asked = id(resolved), activation, layout, use_fp8, of_layer
    kind = x.device, x.dtype, x.shape[-1], weights[1].shape, weights[2] is None, low_rank

    found = _fits.get((asked, kind))
    if found is not None:
        return found[1]
    plan = make_plan(activation, layout, use_fp8, *of_layer)
    return _fitted((asked, kind), resolved, lambda: (plan, plan.kind_of(x, weights, low_rank)))


def _fitted(asked: Any, holds: object, plan: Callable[[], tuple[Plan, Kind]]) -> Plan:
    """The plan that `plan` gives, fitted to calls of the kind that it gives: decided once for `asked`,
    because to ask for packages and devices takes longer than a launch, and so does to hash settings.

    holds: an object by whose identity `asked` names it. The table keeps it, so no other one can have
    its id. A configuration resolves to the same object until the environment is read again.
    """
    found = _fits.get(asked)
    if found is None:
        if len(_fits) >= MAX_FITS:
            _fits.clear()
        found = _fits[asked] = holds, _fit(*plan())
    return found[1]


def _fit(plan: Plan, kind: Kind) -> Plan:
    with plan.config.activate():
        choice = ready_engine(kind.device, plan.engine, plan.workload(kind))
        announce(choice, kind.device)
    found = dataclasses.replace(plan, settings=choice.settings or plan.settings)
    object.__setattr__(found, "chosen", choice.engine)
    object.__setattr__(found, "dequantises", choice.dequantises is not None)
    return found


MAX_FITS = 4096
# The process's only table of engines by kinds of calls: every layer asks it when it is bound.
_fits: dict[Any, tuple[object, Plan]] = {}
_plans: dict[int, Plan] = {}


def number_of(plan: Plan) -> int:
    """The number that stands for `plan` in a compiled graph, which holds tensors and numbers only.

    It is a digest of the plan and not a counter, because the compiler's caches keep graphs beyond
    the process, and another process must give the same plan the same number.
    """
    number = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "big")
    _plans[number] = plan
    return number


def _known(*fields: Any) -> Plan:
    plan = Plan(*fields)
    number_of(plan)
    return plan


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
