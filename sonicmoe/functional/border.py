"""Checks of the PyTorch face before anything is computed. Each message names the caller's argument.
Sizes of weights are the engine's to check, which knows the activation and the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from ..enums import ActivationType, is_glu
from ..errors import ConfigError, DeviceError, DTypeError, LayoutError, ShapeError, expect
from ..interop import dtype_name, require_framework_tensor, require_same_device
from ..layouts import Codes, GateUp, WeightLayout
from ..observe import Face
from ..refusals import need_dtype, need_shape

Tensor = torch.Tensor

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODE_DTYPES = (*WEIGHT_DTYPES, torch.uint8, torch.int32)  # of `layouts.Codes` and biases


def need_values(name: str, tensor: Any, module: object = None) -> None:
    """Refuse what is no dense tensor in memory: sparse, nested, or on the meta device. module: whose
    forward reads it, where its parts may be offloaded.
    """
    require_framework_tensor(tensor, name)
    if tensor.device.type == "meta":
        words = f"{name} is on meta, where there are no values; needed: a CPU or a GPU"
        offloads = f"; accelerate offloads with preload_module_classes=[{type(module).__name__!r}]"
        raise DeviceError(words if module is None else words + offloads)


def check_switch(name: str, value: object) -> None:
    """Refuse what is no bool: a text such as "no" is true."""
    # By identity, because every call asks.
    if value is not True and value is not False:
        raise ConfigError(f"{name} is {value!r}; needed: True or False")


def check_tokens(x: Tensor) -> None:
    """Refuse what is no `[T, H]`."""
    need_values("x", x)
    need_shape(len(x.shape) == 2, "x", x, "[T, H]")


def check_router(router_w: Tensor, x: Tensor) -> None:
    """Refuse what is no router of these tokens."""
    need_values("router_w", router_w)
    hidden = int(x.shape[1])
    fits = len(router_w.shape) == 2 and router_w.shape[1] == hidden
    need_shape(fits, "router_w", router_w, f"[E, H] with H = {hidden}, as x has")
    require_same_device([("x", x), ("router_w", router_w)])


def check_router_dtype(x: Tensor, router_w: Tensor) -> None:
    """Raise DTypeError where the router cannot multiply these tokens."""
    if x.dtype != router_w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DTypeError(
            f"x (hidden_states) is {dtype_name(x.dtype)}, router_w (router.weight) is {dtype_name(router_w.dtype)}; "
            "convert one, or use autocast"
        )


def gate_and_up(w1: Any, axes: str) -> Any:
    """A tuple as a `GateUp`, else w1 as it is. Refuse a tuple that is not of two tensors, gate and
    up, of these axes and of one shape, dtype and device.
    """
    if not isinstance(w1, tuple) or isinstance(w1, Codes):
        return w1
    if len(w1) != 2:
        raise ShapeError(f"w1 has {len(w1)} parts; needed: one tensor, or two, gate and up")
    (gate, up), names = w1, ("w1[0]", "w1[1]")
    for name, half in zip(names, w1, strict=True):
        require_framework_tensor(half, name)
        need_shape(len(half.shape) == 3, name, half, axes)
    need_shape(gate.shape == up.shape, names[1], up, f"{tuple(gate.shape)}, as w1[0] has")
    need_dtype(names[1], up, gate.dtype)
    require_same_device([(names[0], gate), (names[1], up)])
    return GateUp(gate, up)


def layout_of(
    activation: ActivationType, concat_layout: bool, w1: Tensor | GateUp | None = None
) -> WeightLayout:
    """Of stacked weights whose w1 has gate and up rows in turns, in halves, or in two tensors."""
    check_switch("concat_layout", concat_layout)
    if isinstance(w1, GateUp):
        words = f"w1 is two tensors, and activation {activation.value!r} has no gate"
        expect(is_glu(activation), ConfigError, f"{words}; needed: one tensor")
        return WeightLayout(split_half=True, apart=True)
    return WeightLayout(split_half=concat_layout and is_glu(activation))


def permuted(w1: Tensor | GateUp, *axes: int) -> Tensor | GateUp:
    """w1 with its axes in this order, by views."""
    if isinstance(w1, GateUp):
        return GateUp(w1.gate.permute(axes), w1.up.permute(axes))
    return w1.permute(axes)


def check_stacks(weights: tuple[Any, ...], experts: int | None, source: str) -> None:
    """Refuse w1 `[N1, H, E]`, w2 `[H, I, E]`, b1 and b2 that are no tensors, and weights of other
    experts; None: as many as w2 has. A w1 of `gate_and_up` is looked at there but for its experts.
    """
    if isinstance(weights[0], Codes) or isinstance(weights[1], Codes):
        _check_codes(weights[0], weights[1], experts, source)
        return
    of_w1 = "w1", weights[0], "[N1, H, E]"
    if isinstance(weights[0], GateUp):
        of_w1 = "w1[0]", weights[0].gate, "[I, H, E]"
        weights = (weights[0].gate, *weights[1:])
    shaped = of_w1, ("w2", weights[1], "[H, I, E]")
    for name, weight in zip(("w1", "w2", "b1", "b2"), weights, strict=True):
        if weight is not None or name in ("w1", "w2"):
            require_framework_tensor(weight, name)
    for name, weight, axes in shaped:
        need_shape(len(weight.shape) == 3, name, weight, axes)
    if experts is None:
        experts, source = int(weights[1].shape[2]), "the last axis of w2"
    for name, weight, axes in shaped:
        needed = f"{experts} experts ({source})"
        firsts = shaped[0][1].shape[0], shaped[1][1].shape[0]
        if weight.shape[0] == experts or firsts[0] == firsts[1]:  # as modules have them
            needed += f"; experts first are passed as {name}.permute(1, 2, 0)"
        need_shape(weight.shape[2] == experts, f"{name} {axes}", weight, needed)


def _check_codes(w1: Any, w2: Any, experts: int | None, source: str) -> None:
    """Refuse codes of `freeze_weights` beside a weight that is not frozen, or of another number of
    experts.
    """
    for name, codes in (("w1", w1), ("w2", w2)):
        if not isinstance(codes, Codes):
            raise TypeError(
                f"{name} is {type(codes).__name__}, and the other weight is frozen; needed: codes of "
                "freeze_weights for both"
            )
        if experts is not None and len(codes.held) != experts:
            raise ShapeError(
                f"{name} has codes of {len(codes.held)} experts; needed: {experts} experts ({source})"
            )


def need_whole(name: str, tensor: Any, module: object) -> None:
    """Refuse a part of a tensor, which is what a rank has of it outside the forward of the unit that
    FSDP2 or ZeRO-3 gathers. module: whose forward reads it; None where unknown.
    """
    unit = "the module that calls this function" if module is None else type(module).__name__
    if hasattr(tensor, "to_local"):
        way = f"is a DTensor, of which this rank has a part; needed: fully_shard({unit})"
    elif tensor.shape == _GONE:
        way = f"is empty, as ZeRO-3 leaves parts; needed: set_z3_leaf_modules(model, [{unit}])"
    else:
        return
    words = "or of a module around it, and of none inside it, and calls by way of that one"
    raise LayoutError(f"{name} {way}, {words}")


_GONE = torch.Size([0])
WHOLE = frozenset((Tensor, torch.nn.Parameter))


def check_stored(
    x: Tensor, flat: tuple[Tensor | None, ...], face: Face, module: object = None
) -> None:
    """Refuse weights and biases that are not dense or not whole, are elsewhere than x, or in a dtype
    of which no engine reads values: the codes of a checkpoint in FP8 would pass for numbers. flat:
    see `flat_weights`.
    """
    # Asked in every forward, so the usual case is comparisons alone.
    device, dtypes = x.device, WEIGHT_DTYPES if flat[3] is None else CODE_DTYPES
    if type(x) not in WHOLE:
        need_whole(face.x, x, module)
    for index, weight in enumerate(flat):
        if weight is not None and not (
            weight.dtype in dtypes
            and weight.device == device
            and weight.layout == torch.strided
            and device.type != "meta"
            and type(weight) in WHOLE
            and weight.shape != _GONE
        ):
            first = face.w1 if flat[1] is None else f"{face.w1}[0]"
            scales = f"{face.w2}[1]"
            name = (first, f"{face.w1}[1]", face.w2, scales, face.b1, face.b2)[index]
            need_values(face.x, x)
            need_values(name, weight, module)
            need_whole(name, weight, module)
            need_dtype(name, weight, *dtypes)
            require_same_device([(face.x, x), (name, weight)])


def check_triples(x: Tensor, scores: Tensor, tokens: Tensor, experts: Tensor) -> None:
    """Refuse what are no triples (token, expert, score) beside these tokens."""
    triples = {"router_scores": scores, "token_indices": tokens, "expert_indices": experts}
    for name, values in triples.items():
        need_values(name, values)
    need_shape(len(scores.shape) == 1, "router_scores", scores, "one axis")
    # The name of a dtype is composed only for the message, because the compiler warns of the cache
    # of names where it traces one. Codes of 8 bits are no scores.
    if not scores.is_floating_point() or scores.dtype.itemsize == 1:
        raise DTypeError(f"router_scores is {dtype_name(scores.dtype)}; needed: a floating type")
    shape = tuple(scores.shape)
    for name, ids in (("token_indices", tokens), ("expert_indices", experts)):
        need_shape(tuple(ids.shape) == shape, name, ids, f"that of router_scores, {shape}")
        need_dtype(name, ids, torch.int32, torch.int64)
    require_same_device([("x", x), *triples.items()])
