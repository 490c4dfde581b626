"""Which activation of the engine a module of experts has, recognised by trying the module's own.

Names say nothing: a class may call another formula by the same name. So the gate runs on points on
both sides of every bound, and values and gradients are compared with every record of `ACTIVATIONS`.
It runs on a copy of the module that tells what the gate reads, until the copy has all of that which
the module has. Modules with equal descriptions compute the same, but for what hooks, a `forward` of
the instance, or a read that nobody can see change. So the module itself is tried last.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
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
Names = tuple[str, ...]
Found = tuple[ActivationType, ActivationParameters]
# What a module computes with: its class, whose functions may be replaced, what it and its class
# have of some names, and the same of its children. A function in place of a module stands for
# itself.
Description = Any

_OF_EVERY_MODULE = frozenset(dir(nn.Module()))
ALWAYS_READ = "forward", "__call__"  # of every module that is called
_ABSENT = object()
# Beside the bounds that a module names, and far beyond every bound that it may hide.
_TICKS = (0.01, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 12.0, 40.0, 500.0, 3e4)
_OVERFLOWS = 1e15  # products of what lies beyond
# Of fp32, in units of what the product of gate and up may reach: beyond its bounds a gradient is a
# difference of rounded numbers.
_TOLERANCE = 2e-6


def activation_of(experts: nn.Module, standard_gate: Any) -> tuple[Found | str, Names]:
    """The engine's activation that equals this module's, with its parameters; or what the module
    has instead, and what was tried. Beside it the names that the gate reads, for `state_of`.

    standard_gate: the `_apply_gate` of classes that compute act(gate) * up.
    """
    act = getattr(experts, "act_fn", None)
    gated = getattr(experts, "has_gate", True)
    if gated and _has_own(experts, "_apply_gate"):
        return "an _apply_gate of this instance; needed: one of its class", ()
    # Looked up on the class: from an instance it would be another object every time.
    gate = getattr(type(experts), "_apply_gate", None) if gated else None
    gate, tried = (None, act) if gate is standard_gate or not gated else (gate, experts)
    halves, names = getattr(experts, "is_concatenated", True), ()
    while True:
        found, read = recognised(gate, described(tried, names), names, gated, halves)
        if read == names:
            break
        names = read
    # torch.compile guards every attribute that a description has, and would guard a module that is
    # tried by its identity: no two layers could share a graph.
    if isinstance(found, str) or (torch.compiler.is_compiling() and not _is_overridden(act)):
        return found, names
    return checked(gate, tried, found, gated, halves), names


def described(module: Any, names: Names) -> Description:
    """What a module computes with, of attributes those of these names; anything else as it is."""
    if not isinstance(module, nn.Module):
        return module
    # torch.compile traces this, and guards what it reads: lists and no generators. Asked again for
    # every name: of a `__dict__` that is held it guards every entry.
    kind, plain = _class_of(module), [name for name in names if name != "config"]
    own = [(name, module.__dict__[name]) for name in plain if _has_own(module, name)]
    # A tensor may change unseen, as a list may.
    own += [(n, [n]) for n in plain if n in module._parameters or n in module._buffers]
    of_class = [(name, getattr(kind, name)) for name in plain if hasattr(kind, name)]
    children = [(name, described(child, names)) for name, child in module._modules.items()]
    if "config" in names and _has_own(module, "config"):
        config = module.__dict__["config"]
        read = tuple([(name, getattr(config, name)) for name in plain if hasattr(config, name)])
        children.append(("config", (nn.Module, (), read, (), ())))
    functions = kind.forward, kind.__call__
    return kind, functions, tuple(own), tuple(of_class), tuple(children)


def _has_own(module: nn.Module, name: str) -> bool:
    # Of a `__dict__` alone torch.compile guards no name that is missing.
    return hasattr(module, name) and name in module.__dict__


def _class_of(module: nn.Module) -> type[nn.Module]:
    # Parametrized weights give a module a new class every time.
    kind = type(module)
    return kind.__bases__[0] if "parametrizations" in module._modules else kind


def state_of(module: nn.Module, names: Names, config: Any = None) -> tuple[Any, ...]:
    """All that decides what a module computes, where its gate reads these names: what `described`
    tells, hooks, and what it has itself of `ALWAYS_READ`, which is part of names. Asked in every
    forward, so it calls nothing that it need not.

    config: of which they are read too.
    """
    own, kind = module.__dict__, type(module)
    children = own["_modules"]
    if "parametrizations" in children:
        kind = _class_of(module)
    found = (
        kind,
        *own["_forward_hooks"], *own["_forward_pre_hooks"], *own["_backward_hooks"], *own["_backward_pre_hooks"],
        *own["_parameters"], *own["_buffers"], *children,
        *map(own.get, names, repeat(_ABSENT)), *map(getattr, repeat(kind), names, repeat(_ABSENT)),
    )  # fmt: skip
    if config is not None:
        found += tuple(map(getattr, repeat(config), names, repeat(_ABSENT)))
    for name in children:
        if children[name] is not None:
            found += state_of(children[name], names)
    return found


def _is_overridden(act: Any) -> bool:
    """Whether a call of a module, or of one in it, is more than the forward of its class."""
    if not isinstance(act, nn.Module):
        return False
    hooks = act._forward_hooks, act._forward_pre_hooks, act._backward_hooks, act._backward_pre_hooks
    if _has_own(act, "forward") or any([len(of_a_kind) > 0 for of_a_kind in hooks]):
        return True
    return any([_is_overridden(child) for child in act._modules.values()])


# torch.compile runs this while tracing and takes the answer as a constant: the trial is no part of
# the graph.
@torch.compiler.assume_constant_result
def recognised(
    gate: Any, description: Description, names: Names, gated: bool, halves: bool
) -> tuple[Found | str, Names]:
    """As `activation_of`, of a class's own `gate`, or (None) of the activation that `description`
    is of; and `names` with those that were read beside them.

    halves: whether the gate gets all gates before all ups, not pairs.
    """
    try:
        hash(description)
    except TypeError as error:
        changing = [name for name, value in _values(description) if type(value).__hash__ is None]
        which = f"{_what(gate, description)}, which reads {', '.join(changing) or 'one'}"
        return f"{which}, which may change unseen ({error})", names
    found, read = _recognised(gate, description, gated, halves)
    return found, tuple(sorted({*names, *read}))


@functools.cache
def _recognised(
    gate: Any, description: Description, gated: bool, halves: bool
) -> tuple[Found | str, set[str]]:
    return _apart(_tried, gate, description, gated, halves)  # type: ignore[no-any-return]


# As above.
@torch.compiler.assume_constant_result
def checked(gate: Any, module: Any, found: Found, gated: bool, halves: bool) -> Found | str:
    """`found`, or how the module itself differs from it."""
    return _apart(_checked, gate, module, found, gated, halves)  # type: ignore[no-any-return]


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    # The first call may come from inside anything: inference, autocast, a checkpoint that counts
    # saved tensors, a mode that makes fake ones. A thread of its own has none of these.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def _tried(
    gate: Any, description: Description, gated: bool, halves: bool
) -> tuple[Found | str, set[str]]:
    what, read = _what(gate, description), set[str]()
    numbers = sorted(set(_numbers(description)))
    z, dy1, scale = _points(numbers, gated)
    try:
        ran = [
            _run(_as_function(gate, _copy(description, training, read), gated, halves), z, dy1)
            for training in (True, False)
        ]
    # It is anybody's code.
    except Exception as error:
        return f"{what}, which fails on a copy that has what it reads: {error!r}", read
    by_pair = scale.repeat_interleave(2, 1) if gated else scale
    for activation, parameters in _candidates(gated, numbers):
        wanted, gradient = activate_backward(z, dy1, activation, parameters)
        if all(_same(y1, wanted, scale) and _same(dz, gradient, by_pair) for y1, dz in ran):
            return (activation, parameters), read
    names = ", ".join(member.value for member in ACTIVATIONS if is_glu(member) == gated)
    given = f" with the numbers {numbers}" if numbers else ""
    tried = f"tried in values and gradients at {z.numel()} points{given}"
    return f"{what}, {tried}; needed: one that equals one of {names}", read


def _checked(gate: Any, module: Any, found: Found, gated: bool, halves: bool) -> Found | str:
    z, dy1, scale = _points([number for _, number in found[1]], gated)
    words = f"{_what(gate, described(module, ()))}, whose hooks, forward or attributes make it"
    try:
        ran = _run(_as_function(gate, module, gated, halves), z, dy1)
    except Exception as error:
        return f"{words} fail: {error!r}"
    scales = scale, scale.repeat_interleave(2, 1) if gated else scale
    for name, own, wanted, of in zip(
        ("values", "gradients"), ran, activate_backward(z, dy1, *found), scales, strict=True
    ):
        if not _same(own, wanted, of):
            far = ((own - wanted).abs() / of).argmax() if own.shape == wanted.shape else 0
            numbers = f"{own.flatten()[far]:.6g}, where the engine has {wanted.flatten()[far]:.6g}"
            return f"{words} differ from {found[0].value} in {name}: {numbers}"
    return found


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


def _copy(description: Description, training: bool, read: set[str]) -> Any:
    """A module as described, which adds to `read` the names of the attributes that its code reads."""
    if not isinstance(description, tuple):
        return description
    kind, _, own, _, children = description

    def recording(self: Any, name: str) -> Any:
        if name not in _OF_EVERY_MODULE:
            read.add(name)
        return kind.__getattribute__(self, name)

    # Not the constructor of the class, which would make weights.
    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": recording}))
    nn.Module.__init__(copy)
    copy.training = training
    copy.__dict__.update(own)
    for name, child in children:
        copy._modules[name] = _copy(child, training, read)
    return copy


def _values(description: Description) -> Iterator[tuple[str, Any]]:
    """What a description has, by name."""
    if isinstance(description, tuple):
        _, _, own, of_class, children = description
        yield from (*own, *of_class)
        for _, child in children:
            yield from _values(child)


def _numbers(description: Description) -> Iterator[float]:
    for _, value in _values(description):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)


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
