"""The caller of a call by the names of its parameters: `model.layers.3.mlp.experts.gate_up_proj`.

A layer does not know its name in the model, and an engine sees tensors only. So the parameter is
looked for among all modules of the process. That takes a fraction of a second, and only a finding
or a copy of a call pays it.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..interop import IS_PADDLE
from ..observe import FACES, NODE, ExpertCall
from .step_dump import Caller

Tensor = torch.Tensor

_CHILDREN = "_sub_layers" if IS_PADDLE else "_modules"
_COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wraps


def caller_of(call: ExpertCall) -> Caller:
    """Names from the model where its modules hold the weights, else those of the arguments."""
    face, model = FACES[call.face], _Names()
    module = model.path_of(call.module).removesuffix(".")
    found = {name: model.names(weights) for name, weights in call.weights.items()}
    weights = {name: names or _arguments(call, name, module) for name, names in found.items()}
    for name, held in call.weights.items():
        # Gate and up in two tensors are one weight, where matrices of experts have a name each.
        if len(held) == 2 and len(held[0].shape) == 3 and found[name]:
            weights[name] = (" and ".join(found[name]),)
    owned = [name for names in found.values() for name in names]
    # Tokens and probabilities are arguments, which no module holds.
    tokens = {"x": (face.x,), "out": (face.out,), "probs": (face.probs,)}
    return Caller({**tokens, **weights}, module or _common_module(owned))


def parameters_behind(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters that the weights of a module may be computed from, with this rank's
    part: its own, and those of adapters around it (PEFT keeps what it wraps as `base_layer`).
    """
    model = _Names()
    path = model.path_of(module)
    while path.endswith("base_layer."):
        path = path.removesuffix("base_layer.")
    for prefix, found in model.modules:
        if prefix == path and any(part is module for part in found.modules()):
            for name, parameter in found.named_parameters():
                yield path + name, _local(parameter)


def names_of_factors(call: ExpertCall) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each factor of a call's low-rank adapters: the name of the parameter where a
    module holds one, else of the argument.
    """
    model = _Names()
    for name, factor in call.factors.items():
        yield next(iter(model.names([factor])), f"adapters.{name}"), factor


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same tensor, or views of the same memory."""
    return _identity(one) == _identity(other)


def _arguments(call: ExpertCall, name: str, module: str) -> tuple[str, ...]:
    """A weight that no module holds: by its argument, or by the attribute of `module`."""
    prefix = f"{module}." if module else ""
    if call.face != NODE or name in ("b1", "b2"):
        return (prefix + str(getattr(FACES[call.face], name)),)
    count, is_up = len(call.weights[name]), name == "w1"
    if count == 1:
        return ("weight1" if is_up else "weight2",)
    part = "up_gate_proj" if is_up else "down_proj"
    return tuple(f"experts[{expert}].{part}.weight" for expert in range(count))


class _Names:
    """The modules of this process by their names, which end in a dot: `model.layers.3.`."""

    def __init__(self) -> None:
        every = _every_module()
        inner = {id(child) for module in every for _, child in _parts(module, _CHILDREN)}
        outermost = [module for module in every if id(module) not in inner]
        self.modules = [each for module in outermost for each in _below(module, "", ())]
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for path, module in self.modules:
            for name, parameter in _parts(module, "_parameters"):
                known = self._parameters.setdefault(_identity(parameter), [])
                known.append((path + name, parameter))

    def path_of(self, module: object) -> str:
        """The name of a module, empty where it is not known or the outermost."""
        return _longest(path for path, found in self.modules if found is module)

    def names(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        """A weight, stacked or one per expert, by the parameters; none where one is not found."""
        found = [self._name(weight) for weight in weights]
        return tuple(found) if all(found) else ()

    def _name(self, tensor: Tensor) -> str:
        """The name of the parameter that this tensor is or is a view of; empty if there is none."""
        return _longest(
            # Experts compute on one part of a distributed weight, and so does its index.
            name + ("" if _local(parameter) is parameter else ".to_local()")
            for name, parameter in self._parameters.get(_identity(tensor), ())
            if _is_the_whole_of(tensor, parameter)
        )


def _below(module: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """A module and all that it holds, by name."""
    yield path, module
    for name, child in _parts(module, _CHILDREN):
        if id(child) not in above:
            own = "" if name == _COMPILED else f"{name}."
            yield from _below(child, path + own, (*above, id(module)))


def _longest(names: Iterable[str]) -> str:
    """A module may be part of several: the outermost has the longest name. Of equals any will do,
    but always the same.
    """
    return min(names, key=lambda name: (-name.count("."), name), default="")


def _every_module() -> list[Any]:
    base = sys.modules["paddle"].nn.Layer if IS_PADDLE else torch.nn.Module
    # By the type and not by `isinstance`, which asks the `__class__` of every proxy in the process.
    return [found for found in gc.get_objects() if issubclass(type(found), base)]


def _parts(module: Any, attribute: str) -> list[tuple[str, Any]]:
    # From the dictionary of the instance: modules may compute their attributes, and one that is
    # being made has none yet.
    held = vars(module).get(attribute) or {}
    return [(name, part) for name, part in list(held.items()) if part is not None]


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _memory_of(tensor: Any) -> int | None:
    """The address of the allocation; None where there is none, and under Paddle, whose callers give
    parameters themselves.
    """
    if IS_PADDLE:
        return None
    try:
        return int(_local(tensor).untyped_storage().data_ptr()) or None
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a parameter that was not made yet, or a tensor without data


def _identity(tensor: Any) -> int:
    """The same number for tensors that share memory; under Paddle, and for tensors without data, for
    the same tensor alone.
    """
    return _memory_of(tensor) or -id(tensor)


def _is_the_whole_of(tensor: Tensor, parameter: Any) -> bool:
    """Of two tensors that share memory: sharded models have slices of one memory as parameters."""
    whole = _local(parameter)
    return parameter is tensor or (
        (tensor.storage_offset(), tensor.numel()) == (whole.storage_offset(), whole.numel())
    )


def _common_module(names: Sequence[str]) -> str:
    """The module that all of these parameters are below."""
    parts = [name.removesuffix(".to_local()").split(".")[:-1] for name in names]
    together = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in together)
