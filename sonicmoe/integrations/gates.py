"""Which activation of the engine a module of experts has, recognised by trying the module's own.

Names say nothing: a class may call another formula by the same name. So the gate runs on points on
both sides of every bound, and values and gradients are compared with every record of `ACTIVATIONS`.
It runs on a copy of the module that has only what its description lists. Modules with equal
descriptions compute the same, and a gate that reads anything else fails on the copy and is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ..engine.activations import activate_backward, merge_gate_up, split_gate_up
from ..enums import (
    ACTIVATIONS,
    ActivationParameters,
    ActivationType,
    Parameter,
    is_glu,
    layer_parameters,
)
from ..errors import ConfigError

Tensor = torch.Tensor
Found = tuple[ActivationType, ActivationParameters]
# What a module computes with: its class, its attributes of the names below, and the same of its
# children. A function in place of a module stands for itself.
Description = Any

# What a gate may read of experts and of their configuration, and what may be read of an activation.
# Who reads another name is refused, with that name. These are lists, because torch.compile up to
# 2.12 cannot trace a walk over all attributes.
PARAMETERS = (
    "limit", "swiglu_limit", "alpha", "swiglu_alpha", "mlp_gate_softcap", "mlp_up_softcap",
)  # fmt: skip
OF_ACTIVATIONS = ("act", "approximate", "inplace", "precomputed_constant", "softcap", "limit")
# Beside the bounds that a module names, and far beyond every bound that it may hide.
_TICKS = (0.01, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 12.0, 40.0, 500.0, 3e4)
_OVERFLOWS = 1e15  # products of what lies beyond
# Of fp32, in units of what the product of gate and up may reach: beyond its bounds a gradient is a
# difference of rounded numbers.
_TOLERANCE = 2e-6


def activation_of(
    experts: nn.Module, standard_gate: Any, *, reads_config: bool = True
) -> Found | str:
    """The engine's activation that equals this module's, with its parameters; or what the module
    has instead, and what was tried.

    standard_gate: the `_apply_gate` of classes that compute act(gate) * up. reads_config: whether
    the gate may read the module's configuration.
    """
    act = getattr(experts, "act_fn", None)
    gated = getattr(experts, "has_gate", True)
    if gated and "_apply_gate" in experts.__dict__:
        return "an _apply_gate of this instance; needed: one of its class"
    # Looked up on the class: from an instance it would be another object every time.
    gate = getattr(type(experts), "_apply_gate", None)
    if not gated or gate is standard_gate:
        return recognised(None, described(act), gated, True)
    halves = getattr(experts, "is_concatenated", True)
    kind, own = type(experts), _named(experts, PARAMETERS)
    children: tuple[Any, ...] = (("act_fn", described(act)),)
    found = recognised(gate, (kind, own, children), True, halves)
    config = getattr(experts, "config", None)
    # Second, because a configuration takes long to answer, and few gates read it.
    if isinstance(found, str) and config is not None and reads_config:
        children += (("config", (nn.Module, _named(config, PARAMETERS), ())),)
        found = recognised(gate, (kind, own, children), True, halves)
    return found


def described(module: Any) -> Description:
    """What a module computes with; anything else as it is."""
    if not isinstance(module, nn.Module):
        return module
    # torch.compile traces this, and guards what it reads: lists and no generators.
    children = [(name, described(child)) for name, child in module._modules.items()]
    return type(module), _named(module, OF_ACTIVATIONS), tuple(children)


def _named(owner: Any, names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    # Asked again for every name: of a `__dict__` that is held torch.compile guards every entry.
    return tuple([(name, owner.__dict__[name]) for name in names if name in owner.__dict__])


# torch.compile runs this while tracing and takes the answer as a constant: the trial is no part of
# the graph.
@torch.compiler.assume_constant_result
def recognised(gate: Any, description: Description, gated: bool, halves: bool) -> Found | str:
    """As `activation_of`, of a class's own `gate`, or (None) of the activation that `description`
    is of.

    halves: whether the gate gets all gates before all ups, not pairs.
    """
    try:
        hash(description)
    except TypeError as error:
        return f"{_what(gate, description)}, which may change unseen ({error})"
    return _recognised(gate, description, gated, halves)


@functools.cache
def _recognised(gate: Any, description: Description, gated: bool, halves: bool) -> Found | str:
    # The first call may come from inside anything: inference, autocast, a checkpoint that counts
    # saved tensors, a mode that makes fake ones. A thread of its own has none of these.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, gate, description, gated, halves).result()


def _tried(gate: Any, description: Description, gated: bool, halves: bool) -> Found | str:
    what = _what(gate, description)
    numbers = sorted(set(_numbers(description)))
    z, dy1, scale = _points(numbers, gated)
    try:
        ran = [
            _run(_as_function(gate, _copy(description, training), gated, halves), z, dy1)
            for training in (True, False)
        ]
    # It is anybody's code.
    except Exception as error:
        return f"{what}, which fails on a copy that has its act_fn and parameters alone: {error!r}"
    by_pair = scale.repeat_interleave(2, 1) if gated else scale
    for activation, parameters in _candidates(gated, numbers):
        wanted, gradient = activate_backward(z, dy1, activation, parameters)
        if all(_same(y1, wanted, scale) and _same(dz, gradient, by_pair) for y1, dz in ran):
            return activation, parameters
    names = ", ".join(member.value for member in ACTIVATIONS if is_glu(member) == gated)
    given = f" with the numbers {numbers}" if numbers else ""
    tried = f"tried in values and gradients at {z.numel()} points{given}"
    return f"{what}, {tried}; needed: one that equals one of {names}"


def _points(numbers: list[float], gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`z` with every pair of ticks as gate and up, a gradient of y1, and what errors are measured
    by at each point.
    """
    around = [abs(number) * factor for number in numbers for factor in (0.99, 1.0, 1.01)]
    above = [*_TICKS, *(bound for bound in around if bound < _OVERFLOWS)]
    ticks = sorted({0.0, *above, *(-tick for tick in above)})
    points = torch.tensor(ticks, dtype=torch.float32, device="cpu")
    pairs = torch.cartesian_prod(points, points)
    # In no order, so that a gate which takes a pair from two columns or rows is seen.
    seeded = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(pairs), generator=seeded, device="cpu")
    gates, ups = pairs[order].view(len(ticks), len(ticks), 2).unbind(-1)
    dy1 = torch.linspace(-1.0, 2.0, gates.numel(), dtype=torch.float32, device="cpu")
    z, factor = (merge_gate_up(gates, ups), ups) if gated else (gates, gates)
    return z, dy1.view_as(gates), (1.0 + gates.abs()) * (1.0 + factor.abs())


def _run(function: Callable[[Tensor], Tensor], z: Tensor, dy1: Tensor) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    y1 = function(leaf)
    (dz,) = torch.autograd.grad(y1, leaf, dy1)
    return y1.detach(), dz


def _as_function(gate: Any, copy: Any, gated: bool, halves: bool) -> Callable[[Tensor], Tensor]:
    """y1 of native z, as the copy of a module computes it."""

    def function(z: Tensor) -> Tensor:
        if not gated:
            return copy(z)  # type: ignore[no-any-return]
        first, second = split_gate_up(z)
        if gate is None:
            return copy(first) * second  # type: ignore[no-any-return]
        return gate(copy, torch.cat([first, second], 1) if halves else z)  # type: ignore[no-any-return]

    return function


def _copy(description: Description, training: bool) -> Any:
    if not isinstance(description, tuple):
        return description
    kind, values, children = description
    # Not the constructor of the class, which would make weights.
    copy = object.__new__(kind)
    nn.Module.__init__(copy)
    copy.training = training
    for name, value in values:
        setattr(copy, name, value)
    for name, child in children:
        setattr(copy, name, _copy(child, training))
    return copy


def _numbers(description: Description) -> Iterator[float]:
    if isinstance(description, tuple):
        _, values, children = description
        for _, value in values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)
        for _, child in children:
            yield from _numbers(child)


def _candidates(gated: bool, numbers: list[float]) -> Iterator[Found]:
    for activation, record in ACTIVATIONS.items():
        if record.gated != gated:
            continue
        choices = [_choices(parameter, numbers) for parameter in record.parameters]
        for values in itertools.product(*choices):
            names = [parameter.name for parameter in record.parameters]
            yield activation, layer_parameters(activation, dict(zip(names, values, strict=True)))


def _choices(parameter: Parameter, numbers: list[float]) -> list[float]:
    """The parameter's default, and every number of the module that it may have."""
    found = [parameter.default]
    for number in numbers:
        try:
            found.append(parameter.read(number))
        except ConfigError:
            # No clamp is a clamp beyond every number. A softcap divides by its bound, so no finite
            # one stands for none.
            if number == math.inf and parameter.name == "limit":
                found.append(parameter.high)
    return found


def _same(found: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    # NaN is never within a tolerance.
    return bool(((found - wanted).abs() <= _TOLERANCE * scale).all())


def _what(gate: Any, description: Description) -> str:
    return f"the activation {_name(description)}" if gate is None else "a gate of its own"


def _name(description: Description) -> str:
    """The class of an activation, or the function that it is."""
    if isinstance(description, tuple):
        return str(description[0].__name__)
    # Functions that are not written in Python may have no module.
    name = getattr(description, "__qualname__", None)
    module = getattr(description, "__module__", None)
    return ".".join(filter(None, (module, name))) if name else repr(description)
