"""peft's adapters on stacked weights of experts (`LoraConfig(target_parameters=...)`) as the
engine's.

peft wraps the experts in one `ParamWrapper` per adapted weight. Its forward parametrizes the
weight, which makes a new one of full size, and its gradient, in every pass. `hand_over` has it pass
the two factors to the experts instead, where these run on this engine: names, files, scales and
every method of peft stay its own, because the parameters do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from logging import INFO, WARNING
from typing import Any

import torch
from torch import nn

from ..functional.frozen import freeze_weight, frozen_in, thaw_weight
from ..functional.peft_pairs import low_rank_of, too_high
from ..log import log_once, logger
from ..weights.stacked_cache import forget

Tensor = torch.Tensor
_HANDS_OVER = "_sonicmoe_hands_over"
LEFT_TO_PEFT = "peft computes them, by weights and gradients of full size"


def hand_over(takes: Callable[[nn.Module, str], bool]) -> None:
    """Change `ParamWrapper` of peft, once, where peft is installed.

    takes: whether these experts, with this weight adapted, have a forward that accepts the argument
        `adapters`, a `LowRank` by the name of the weight. All others run as peft runs them.
    """
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:  # not there, or older than 0.17, which knows no `target_parameters`
        return
    if hasattr(ParamWrapper, _HANDS_OVER):
        return
    setattr(ParamWrapper, _HANDS_OVER, True)
    parametrizes = ParamWrapper.forward

    @functools.wraps(parametrizes)
    def forward(self: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
        asked = options.get("adapter_names") is not None  # peft refuses it by name
        if asked or self.merged or not takes(self.get_base_layer(), self.parameter_name):
            return parametrizes(self, x, *arguments, **options)
        problem = too_high(self)
        if problem is not None:
            # torch.compile traces this, and cannot write.
            if not torch.compiler.is_compiling():
                log_once(WARNING, "%s", f"{problem}: {LEFT_TO_PEFT}")
            return parametrizes(self, x, *arguments, **options)
        self._check_forward_args(x, *arguments, **options)
        pair = low_rank_of(self)
        if pair is not None:
            # Wrappers of one module lie inside each other, so the outer one's pair comes in here.
            others = options.get("adapters", {})
            options["adapters"] = {**others, self.parameter_name: pair}
        return self.base_layer(x, *arguments, **options)

    ParamWrapper.forward = forward
    for name in ("merge", "unmerge"):
        setattr(ParamWrapper, name, _announcing(getattr(ParamWrapper, name)))


def left_to_peft(model: nn.Module, takes: Callable[[nn.Module, str], bool]) -> set[str]:
    """Whose adapters peft computes itself though these experts run on the engine, and why. takes: as
    of `hand_over`.
    """
    # A wrapper of one weight has its name.
    wrappers: list[Any] = [part for part in model.modules() if hasattr(part, "parameter_name")]
    taken = [w for w in wrappers if takes(w.get_base_layer(), w.parameter_name)]
    return {f"{problem}: {LEFT_TO_PEFT}" for problem in map(too_high, taken) if problem}


def _announcing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `ParamWrapper` that writes the weight through `.data`, which leaves no trace."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        base, name = self.get_base_layer(), self.parameter_name
        forget(self.get_param())
        kind = frozen_in(base).get(name)
        if kind is None:
            return method(self, *arguments, **options)
        # peft adds to numbers, and the parameter holds bytes of codes.
        thaw_weight(base, name, torch.float32)
        try:
            return method(self, *arguments, **options)
        finally:
            lost = freeze_weight(base, name, *kind)
            words = "%s of adapters into frozen codes of %s: relative error %.2f %%"
            logger.log(INFO, words, method.__name__, name, 100 * lost.error)

    return call
