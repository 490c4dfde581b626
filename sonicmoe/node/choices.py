"""What the calls of one node run: the settings that its configuration means, and the engines that
were chosen for them. Both are remembered, because every forward asks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..config import ResolvedConfig, SonicMoEConfig, active_config, current_config
from ..engine.interface import Engine, EngineSettings
from ..engine.select import announce, ready_engine
from ..engine.settings import TokenFormat, Workload
from ..enums import ActivationParameters, ActivationType
from ..interop import device_name, dtype_name

_KEPT = 4  # engine choices


class Chosen(NamedTuple):
    """What a call runs. settings: others than those asked for where `auto` falls back from FP8 to
    BF16. dequantises: the engine is handed the values of tokens that arrived in FP8. validates:
    what routing tensors hold is checked.
    """

    engine: Engine
    settings: EngineSettings
    dequantises: bool
    validates: bool


class Choices:
    """The settings and engines of one node.

    config: the node's own; None where it follows the one in force.
    """

    def __init__(
        self,
        config: SonicMoEConfig | None,
        activation: ActivationType,
        activation_parameters: ActivationParameters,
        hidden: int,
        inner: int,
        separate: bool = False,
    ) -> None:
        """Nothing is chosen yet; `hidden`, `inner`: H and I; `separate`: as in `Workload`."""
        self.config = config
        self._layer = activation, activation_parameters
        self._sizes, self._separate = (hidden, inner), separate
        # A configuration, and what it means.
        self._meaning: tuple[Any, ...] = (None,)
        self._engines: list[tuple[Any, Chosen]] = []

    def __reduce__(self) -> tuple[type[Choices], tuple[Any, ...]]:
        """A copy chooses by itself: it may be loaded where other engines can run."""
        return Choices, (self.config, *self._layer, *self._sizes, self._separate)

    def settings(self) -> tuple[ResolvedConfig, EngineSettings]:
        """The configuration in force for the node, and what it means."""
        config = current_config(self.config)
        # `resolve` returns the same object while nothing changed, so identity is the cheapest test.
        # Kept in one tuple, because threads may run calls of one node.
        if self._meaning[0] is not config:
            self._meaning = config, EngineSettings.from_config(config, *self._layer)
        return self._meaning  # type: ignore[return-value]

    def scope(self) -> AbstractContextManager[SonicMoEConfig]:
        """The node's configuration in force: its cache directories and its ban on compiling hold
        for every kernel it loads.
        """
        return (self.config or active_config()).activate()

    def engine(
        self,
        device: str,
        token_dtype: str,
        tokens: TokenFormat = TokenFormat.PLAIN,
        bias: bool = False,
        low_rank: bool = False,
    ) -> Chosen:
        """The engine for such tokens on that device, ready to run; one that was asked for by name
        and cannot run this raises. The log says which at its first choice.
        """
        config, settings = self.settings()
        key = (device, config, settings, token_dtype, tokens, bias, low_rank)
        # Asking for packages and devices takes longer than a launch. Several answers are kept,
        # because calls may differ from one to the next; a list, because configuration and settings
        # are equal by identity nearly always, and their hash takes longer than that.
        for known, chosen in self._engines:
            if known == key:
                return chosen
        sizes = *self._sizes, token_dtype, bias, self._separate
        workload = Workload(settings, *sizes, tokens=tokens, low_rank=low_rank)
        choice = ready_engine(device, config.engine, workload)
        announce(choice, device)
        settings = choice.settings or settings
        dequantises, validates = choice.dequantises is not None, config.validate_dispatch
        chosen = Chosen(choice.engine, settings, dequantises, validates)
        self._engines = [*self._engines[-_KEPT + 1 :], (key, chosen)]
        return chosen

    def engine_for_weights(self, weight: torch.Tensor) -> Chosen:
        """The same before any tokens came."""
        with self.scope():
            return self.engine(device_name(weight), tokens_beside(weight))


def tokens_beside(weight: torch.Tensor) -> str:
    """The dtype that tokens will have as a rule: bfloat16 beside fp32 master weights."""
    return "bfloat16" if weight.dtype == torch.float32 else dtype_name(weight.dtype)
