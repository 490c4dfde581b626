"""Frozen weights in the modules that own them, and as arguments of the functional API.

A frozen parameter keeps its name, its shape and its place in the module. It holds bytes (uint8), which
lie in native order whatever its shape says, so that its memory is contiguous and FSDP2 shards it along
the experts. Its block scales are a second parameter beside it, `NAME_scale` (int32, the bits of fp32).
In a `state_dict` both say what they are: `NAME_e4m3 [E, R, C]`, native, and `NAME_scale_inv` in fp32.
Attributes of these names show the dtypes to those who look entries up in their module, as
torch.distributed.checkpoint and accelerate do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..engine.low_rank import Adapters
from ..engine.select import EngineChoice
from ..enums import ActivationType, member_of
from ..errors import ConfigError, LayoutError, expect
from ..layer.plan import Plan
from ..layouts import NATIVE, Codes, WeightLayout
from ..refusals import need_dtype
from ..weights.frozen import Rounding, check_reader, from_codes, to_codes
from ..weights.stacked_cache import Weights
from .border import (
    WEIGHT_DTYPES,
    check_stacks,
    layout_of,
    need_values,
    need_whole,
    permuted,
)

Tensor = torch.Tensor
FROZEN = "_sonicmoe_frozen"  # attribute of a module: the layout and the index of each such weight
Kinds = dict[str, tuple[WeightLayout, int]]
_ENTRIES = {"_e4m3": torch.float8_e4m3fn, "_scale_inv": torch.float32}  # behind NAME in a state


def freeze_weights(
    w1: Tensor,
    w2: Tensor,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    concat_layout: bool = False,
) -> tuple[Codes, Codes, Rounding]:
    """FP8 codes that are passed in place of w1 and w2 of experts that never train: 1 byte a weight
    and 4 bytes a block of 128x128 or more. Calls with them compute in FP8 (`use_fp8=True`).

    Args:
        w1, w2, activation_type, concat_layout: as of `moe_TC_softmax_topk_layer`; w1 is one tensor.

    Returns:
        `(w1, w2, rounding)`: both in codes, whose rows lie in native order, and what they lost. With
        b1, calls need `concat_layout` as before.

    Raises:
        ShapeError: the weights have not three axes, or not the same number of experts.
        LayoutError: a weight is not finite.
        TypeError: one of them is no tensor.
    """
    activation = member_of(ActivationType, activation_type, "activation_type")
    layout = layout_of(activation, concat_layout)
    check_stacks((w1, w2, None, None), None, "")
    pair = ("w1", w1), ("w2", w2)
    for name, weight in pair:
        need_values(name, weight)
        need_dtype(name, weight, *WEIGHT_DTYPES)
    made = [to_codes(w.permute(2, 0, 1), layout, index) for index, (_, w) in enumerate(pair)]
    (first, lost), (second, more) = made
    return first, second, lost + more


def as_stored(
    w1: Any, w2: Any, b1: Tensor | None, b2: Tensor | None, layout: WeightLayout
) -> tuple[Weights, WeightLayout]:
    """Weights as they lie in memory, by views, and their layout. Codes lie in the native layout, so b1
    is brought into its order.
    """
    if isinstance(w1, Codes):
        return (w1, w2, None if b1 is None else layout.native_b1(b1), b2), NATIVE
    return (permuted(w1, 2, 0, 1), w2.permute(2, 0, 1), b1, b2), layout


def frozen_in(module: nn.Module) -> Kinds:
    """The frozen weights of a module by their names: how they would lie, and 0 for w1, 1 for w2."""
    return module.__dict__.get(FROZEN, {})


def scale_name(name: str) -> str:
    """Of the parameter that holds a weight's block scales."""
    return f"{name}_scale"


def codes_in(module: nn.Module, name: str) -> Codes:
    """A frozen weight of a module, by views."""
    held: Tensor = getattr(module, name)
    # Where peft computes adapters itself, it adds them to what a parametrization shows.
    is_plain = held.dtype == torch.uint8 and not hasattr(module, "parametrizations")
    words = (
        f"{name} of {type(module).__name__} was written or parametrized, and was frozen as codes"
    )
    needed = "thaw_experts(model) before, or adapters of rank 128 or less"
    expect(is_plain, LayoutError, f"{words}; needed: {needed}")
    layout = frozen_in(module)[name][0]
    return Codes(_reshaped(held, layout), getattr(module, scale_name(name)))


def _reshaped(held: Tensor, layout: WeightLayout) -> Tensor:
    """Bytes of a weight in `layout`, between its native shape and that of its parameter, by a view."""
    experts, rows, columns = held.shape
    return held.view(experts, columns, rows) if layout.transposed else held


def frozen_operands(
    module: nn.Module,
    names: Sequence[str],
    layout: WeightLayout,
    b1: Tensor | None,
    adapters: Adapters | None,
) -> tuple[Any, Any, WeightLayout, Tensor | None, Adapters | None]:
    """Both frozen weights of a module, `Codes`, and what stands beside them, given in `layout`, as they do."""
    w1, w2 = [codes_in(module, name) for name in names[:2]]
    b1 = None if b1 is None else layout.native_b1(b1)
    return w1, w2, NATIVE, b1, None if adapters is None else adapters.native(layout)


def check_frozen(module: nn.Module, plan: Plan, choice: EngineChoice) -> None:
    """Refuse a plan and its engine that cannot compute with the codes of this module, if it has any."""
    if frozen_in(module):
        check_reader(choice.settings or plan.settings, choice.engine)


def freeze_weight(module: nn.Module, name: str, layout: WeightLayout, index: int) -> Rounding:
    """Replace a weight by its codes, and give its memory back; nothing is done to a frozen one.

    Args:
        module: owns the parameter `name`, `[E, ..]` in `layout`.
        index: 0 for the up-projection, 1 for the down-projection.

    Raises:
        LayoutError: the weight is a part of one, or has a value that is not finite.
        ConfigError: the weight is no parameter of its module in a floating dtype.
    """
    if name in frozen_in(module):
        return Rounding()
    weight = module._parameters.get(name)
    kind = type(module).__name__
    words = f"{name} of {kind} is no parameter in {', '.join(map(str, WEIGHT_DTYPES))}"
    needed = "plain weights without parametrizations"
    is_plain = weight is not None and weight.dtype in WEIGHT_DTYPES
    expect(is_plain, ConfigError, f"{words}; needed: {needed}")
    assert weight is not None
    need_values(name, weight, module)
    local = local_part(weight)
    _check_divided(weight, local, module, f"{name} of {kind}", "freeze_experts")
    need_whole(name, local, module)
    codes, rounding = to_codes(local, layout, index)
    put_codes(module, name, codes, layout, index, like=weight)
    return rounding


def _check_divided(weight: Any, local: Tensor, module: nn.Module, whose: str, before: str) -> None:
    """Refuse a DTensor of which this rank has not all of its own experts, whole. FSDP2 would go on with
    the parameter that it was given, whatever takes its place. before: what is to come before that.
    """
    if local is weight:
        return
    # Expert parallelism sets the number to that of its own part.
    held, believed = int(local.shape[0]), getattr(module, "num_experts", None)
    is_along_experts = all(getattr(placement, "dim", 0) == 0 for placement in weight.placements)
    words = (
        f"{whose} is a DTensor {weight.placements} with {held} of {believed} experts on this rank"
    )
    needed = f"whole experts: {before} before fully_shard, or ep_size in place of tp_size"
    is_whole = held == believed and is_along_experts
    expect(is_whole, LayoutError, f"{words}; needed: {needed}")


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _divided(local: Tensor, like: Any) -> Tensor:
    """This rank's experts as part of all of them, where `like` is such a DTensor."""
    if not hasattr(like, "to_local"):
        return local
    shape = torch.Size((like.shape[0], *local.shape[1:]))
    return type(like).from_local(  # type: ignore[no-any-return]
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=local.stride(),
    )


def _part_of(tensor: Any, like: Any) -> Any:
    """What came whole as a part of it, where `like` is one."""
    if not hasattr(like, "to_local") or hasattr(tensor, "to_local"):
        return tensor
    # Looked up and not imported: it is there where a DTensor is.
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return distribute(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _viewed(tensor: Any, dtype: torch.dtype, layout: WeightLayout = NATIVE) -> Tensor:
    """The same bytes in another dtype; those of codes in the other shape, too."""
    # Of this rank's part, because DTensor remembers what a view gives without its dtype.
    return _divided(_reshaped(local_part(tensor).view(dtype), layout), tensor)


def put_codes(
    module: nn.Module, name: str, codes: Codes, layout: WeightLayout, index: int, like: Any = None
) -> None:
    """Have these codes be the weight `name` of a module. like: a weight that this is divided as."""
    for key, tensor in ((name, _reshaped(codes.held, layout)), (scale_name(name), codes.scales)):
        parameter = nn.Parameter(_divided(tensor, getattr(like, "data", None)), requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else from_pretrained draws it
        module.register_parameter(key, parameter)
    for suffix, dtype in _ENTRIES.items():
        setattr(module, name + suffix, torch.empty(0, dtype=dtype, device="meta"))
    if FROZEN not in module.__dict__:
        module.register_state_dict_post_hook(_name_codes)
        module.register_load_state_dict_pre_hook(_take_codes)
    # A new dictionary, because a shallow copy of a module shares the old one.
    setattr(module, FROZEN, {**frozen_in(module), name: (layout, index)})


def thaw_weight(module: nn.Module, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Replace a frozen weight by what its codes stand for, in `dtype`; it requires no gradient.
    LayoutError where this rank has a part of its experts.
    """
    held, codes = getattr(module, name), Codes(*map(local_part, codes_in(module, name)))
    whose = f"{name} of {type(module).__name__}"
    _check_divided(held, local_part(held), module, whose, "thaw_experts")
    weight = from_codes(codes, *frozen_in(module)[name], dtype)
    del module._parameters[scale_name(name)]
    for suffix in _ENTRIES:
        module.__dict__.pop(name + suffix, None)
    thawed = nn.Parameter(_divided(weight, held.data), requires_grad=False)
    module.register_parameter(name, thawed)
    setattr(module, FROZEN, {key: kind for key, kind in frozen_in(module).items() if key != name})


def _name_codes(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, (layout, _index) in frozen_in(module).items():
        held, scales = state.pop(prefix + name), state.pop(prefix + scale_name(name))
        state[f"{prefix}{name}_e4m3"] = _viewed(held, torch.float8_e4m3fn, layout)
        state[f"{prefix}{name}_scale_inv"] = _viewed(scales, torch.float32)


def _take_codes(
    module: nn.Module, state: dict[str, Any], prefix: str, _: Any, __: bool, ___: Any, ____: Any,
    errors: list[str],
) -> None:  # fmt: skip
    for name, (layout, _index) in frozen_in(module).items():
        plain = state.pop(prefix + name, None)
        # set_model_state_dict puts the module's own parameters beside what it loads.
        if plain is not None and plain is not module._parameters[name]:
            errors.append(
                f"{prefix}{name} is {plain.dtype}, and the weight is frozen as codes; needed: {prefix}{name}_e4m3 and "
                f"{prefix}{name}_scale_inv, or thaw_experts(model) before"
            )
        held = state.pop(f"{prefix}{name}_e4m3", None)
        scales = state.pop(f"{prefix}{name}_scale_inv", None)
        found = {}
        if held is not None:
            found[name] = _viewed(held, torch.uint8, layout)
        if scales is not None:
            found[scale_name(name)] = _viewed(scales.to(torch.float32), torch.int32)
        for key, tensor in found.items():
            state[prefix + key] = _part_of(tensor, getattr(module, key).data)
