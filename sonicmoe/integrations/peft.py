"""peft's adapters on stacked weights of experts (`LoraConfig(target_parameters=...)`) as the engine's.

peft wraps the experts in one `ParamWrapper` per adapted weight. Its forward parametrizes the weight,
which makes a new one of full size, and its gradient, in every pass. `hand_over` has it pass the two
factors to the experts instead, where these run on this engine: names, files, scales and every method
of peft stay its own, because the parameters do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.low_rank import LowRank
from ..weights.stacked_cache import forget

Tensor = torch.Tensor
_HANDS_OVER = "_sonicmoe_hands_over"


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


def low_rank_of(wrapper: Any) -> LowRank | None:
    """The pair of a wrapper's active adapters, or None where none is active or all are disabled. Several
    make one pair, whose rank is the sum of theirs.
    """
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or not names:
        return None
    pairs = [_pair(wrapper, name) for name in names]
    if len(pairs) == 1:
        return pairs[0]
    b = torch.cat([pair.scale * pair.b for pair in pairs], 2)
    return LowRank(torch.cat([pair.a for pair in pairs], 1), b)


def _pair(wrapper: Any, name: str) -> LowRank:
    """Views of peft's two matrices, `[r * E, in]` with an expert's rows together and `[out, r * E]` with
    an expert's columns E apart.
    """
    experts = wrapper.num_experts
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    # peft reads a weight as `[E, out, in]` where it has exchanged the two, else as `[E, in, out]`.
    # Older versions never did, and took the outputs of untransposed weights for inputs.
    exchanged = getattr(wrapper, "_did_swap_in_out_features", False)
    if exchanged == getattr(wrapper.get_base_layer(), "is_transposed", False):
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return LowRank(a, b, wrapper.scaling[name])


def _announcing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `ParamWrapper` that writes the weight through `.data`, which leaves no trace."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        forget(self.get_param())
        return method(self, *arguments, **options)

    return call
