"""The factors of peft's `ParamWrapper`, which adapts one stacked weight, as a low-rank pair."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.low_rank import MAX_RANK, LowRank
from ..errors import ConfigError, expect
from .border import need_whole


def active_of(wrapper: Any) -> list[str]:
    """Names of the adapters of a wrapper that count: active ones, neither disabled nor merged."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def too_high(wrapper: Any) -> str | None:
    """Why no engine computes a wrapper's active adapters as a pair, in peft's words; None where it
    can.
    """
    names = active_of(wrapper)
    ranks = sum([wrapper.r[name] for name in names])
    if ranks <= MAX_RANK:
        return None
    weight = wrapper.parameter_name
    return f"active adapters {names} of {weight} have ranks (r) of {ranks} in all, above {MAX_RANK}"


def low_rank_of(wrapper: Any) -> LowRank | None:
    """The pair of a wrapper's active adapters, or None where none counts. Several make one pair,
    whose rank is the sum of theirs.

    Raises:
        ConfigError: the rank is above what an engine takes.
    """
    names = active_of(wrapper)
    if not names:
        return None
    problem = too_high(wrapper)
    expect(
        problem is None, ConfigError, f"{problem}; needed: lower ranks, or fewer active adapters"
    )
    pairs = [_pair(wrapper, name) for name in names]
    if len(pairs) == 1:
        return pairs[0]
    b = torch.cat([pair.scale * pair.b for pair in pairs], 2)
    return LowRank(torch.cat([pair.a for pair in pairs], 1), b)


def _pair(wrapper: Any, name: str) -> LowRank:
    """Views of peft's two matrices, `[r * E, in]` with an expert's rows together and `[out, r * E]`
    with an expert's columns E apart.
    """
    experts = wrapper.num_experts
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    for factor, given in (("lora_A", a), ("lora_B", b)):
        base = wrapper.get_base_layer()
        owner = f"{wrapper.parameter_name} in {type(base).__name__}"
        need_whole(f"{factor}[{name!r}].weight of {owner}", given, base)
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    # peft reads a weight as `[E, out, in]` where it has exchanged the two, else as `[E, in, out]`.
    # Older versions never did, and took the outputs of untransposed weights for inputs.
    exchanged = getattr(wrapper, "_did_swap_in_out_features", False)
    if exchanged == getattr(wrapper.get_base_layer(), "is_transposed", False):
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return LowRank(a, b, wrapper.scaling[name])
