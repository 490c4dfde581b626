"""The plan of a call of the routed expert MLP: its settings, and the engine for each kind of
tokens. It is made once and kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import ResolvedConfig, SonicMoEConfig, active_config
from ..engine.interface import Engine, EngineSettings, EngineWeights
from ..engine.select import EngineChoice, announce, choose_engine, ready_engine
from ..engine.settings import Workload
from ..enums import ActivationParameters, ActivationType, EngineName, FirstBackward
from ..errors import ConfigError, expect
from ..interop import device_name, dtype_name
from ..layouts import WeightLayout
from ..observe import STACKED
from ..weights.stacked import PassedParameters
from ..weights.stacked_cache import Weights

Tensor = torch.Tensor


@dataclass(frozen=True)
class Plan:
    """Everything static about a call: hashable, fit to be a constant of a compiled graph.

    face: a key of `observe.FACES`, for those who observe the call.
    is_own: made of a configuration of the layer's own, whatever is in force around a call.
    low_rank: the experts have low-rank adapters.
    """

    config: SonicMoEConfig
    settings: EngineSettings
    layout: WeightLayout
    use_fp8: bool | None
    engine: EngineName
    validate: bool
    face: str = STACKED
    is_own: bool = False
    low_rank: bool = False
    _engine: Engine | None = field(init=False, repr=False, compare=False, default=None)
    _fits: dict[Any, Plan] = field(init=False, repr=False, compare=False, default_factory=dict)
    _passed: dict[Any, PassedParameters] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Any, ...]]:
        """What it was made of: a copy chooses its engine, and is known by its number, where it is."""
        fields = (f.name for f in dataclasses.fields(self) if f.init)
        return _known, tuple(getattr(self, name) for name in fields)

    def fitted(self, x: Tensor, weights: Weights) -> Plan:
        """The plan with settings that the engine for these tokens and experts can compute: `auto`
        falls back from FP8 to BF16, out loud.
        """
        inner, bias = self.layout.intermediate_size(weights[1]), weights[2] is not None
        hidden = int(x.shape[-1])
        # Decided once per kind of call: asking for packages and devices takes longer than a launch,
        # and so does the hash of nested settings.
        kind = x.device, x.dtype, hidden, inner, bias
        found = self._fits.get(kind)
        if found is None:
            device = device_name(x)
            workload = self._workload(hidden, inner, dtype_name(x.dtype), bias)
            with self.config.activate():
                choice = ready_engine(device, self.engine, workload)
                announce(choice, device)
            found = dataclasses.replace(self, settings=choice.settings or self.settings)
            object.__setattr__(found, "_engine", choice.engine)
            # A fitted plan may be fitted again, to calls of another kind too.
            self._fits[kind] = found._fits[kind] = found
        return found

    def foretell(self, device: str, *workload: Any) -> EngineChoice:
        """Log what `fitted` logs, and raise what it raises, but compile nothing. workload: H, I, the
        name of the tokens' dtype, and whether there are biases.
        """
        with self.config.activate():
            choice = choose_engine(device, self.engine, self._workload(*workload))
            announce(choice, device)
        return choice

    def _workload(self, hidden: int, inner: int, dtype: str, bias: bool) -> Workload:
        return Workload(self.settings, hidden, inner, dtype, bias, low_rank=self.low_rank)

    def choose(self) -> Engine:
        """The engine of a fitted plan."""
        assert self._engine is not None
        return self._engine

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


def make_plan(
    activation: ActivationType,
    layout: WeightLayout,
    use_fp8: bool | None,
    parameters: ActivationParameters = (),
    face: str = STACKED,
    low_rank: bool = False,
) -> Plan:
    """The plan under the configuration in force; `use_fp8` True or False overrides its FP8 mode."""
    check_use_fp8(use_fp8)
    config = active_config()
    resolved = config.resolve()
    # By identity: a configuration resolves to the same object until the environment is read again.
    # The plan that is kept beside it holds that object, so no other one can have its id.
    key = id(resolved), activation, layout, use_fp8, parameters, face, low_rank
    made = _made.get(key)
    if made is None:
        # Replaced only where it differs, because a configuration of its own would be resolved anew.
        of_call = resolved
        if use_fp8 is not None and use_fp8 != resolved.fp8:
            config = dataclasses.replace(config, fp8_mode="perf" if use_fp8 else "off")
            of_call = config.resolve()
        expect(
            of_call.first_backward is FirstBackward.ADD,
            ConfigError,
            "first_backward='overwrite' writes main_grad, and here autograd adds the gradients of "
            "the weights to .grad; needed: 'add', or a SonicMoEMlpNode",
        )
        settings = EngineSettings.from_config(of_call, activation, parameters)
        decided = of_call.engine, of_call.validate_dispatch
        plan = Plan(config, settings, layout, use_fp8, *decided, face, low_rank=low_rank)
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
