"""The caller of a call by the names of its parameters: `model.layers.3.mlp.experts.gate_up_proj`.

A layer does not know its name in the model, and an engine sees tensors only. So the parameter is
looked for among all modules of the process. That takes a fraction of a second, and only a finding
or a copy of a call pays it.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..interop import IS_PADDLE
from ..observe import FACES, NODE, ExpertCall
from .callers import Caller

Tensor = torch.Tensor

_COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wraps


def caller_of(call: ExpertCall) -> Caller:
    """Names from the model where its modules hold the weights, else those of the arguments."""
    face = FACES[call.face]
    owners = _Owners(list(itertools.chain(*call.weights.values())))
    module = owners.path_of(call.module)
    found = {name: owners.names(weights) for name, weights in call.weights.items()}
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
    owners = _Owners([])
    while adapter := owners.wrapper_of(module, "base_layer"):
        module = adapter
    prefix = owners.path_of(module)
    for name, parameter in module.named_parameters():
        yield f"{prefix}.{name}".lstrip("."), _local(parameter)


def names_of_factors(call: ExpertCall) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each factor of a call's low-rank adapters: the name of the parameter where a
    module holds one, else of the argument.
    """
    owners = _Owners(list(call.factors.values()))
    for name, factor in call.factors.items():
        yield next(iter(owners.names([factor])), f"adapters.{name}"), factor


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same tensor, or views of the same memory."""
    if one is other:
        return True
    memory = memory_of(one)
    return memory is not None and memory == memory_of(other)


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


class _Owners:
    """The parameters of all modules that may be some of these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # By identity too: under Paddle, and for tensors without data, there is no address.
        wanted_ids = set(map(id, tensors))
        wanted_memory = {memory for memory in map(memory_of, tensors) if memory is not None}
        self._found: list[tuple[Any, str, Tensor]] = []
        self._above: dict[int, list[tuple[Any, str]]] = {}
        for module in _modules():
            for name, child in _parts(module, "_sub_layers" if IS_PADDLE else "_modules"):
                self._above.setdefault(id(child), []).append((module, name))
            for name, parameter in _parts(module, "_parameters"):
                if id(parameter) in wanted_ids or memory_of(parameter) in wanted_memory:
                    self._found.append((module, name, parameter))

    def names(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        """A weight, stacked or one per expert, by the parameters; none where one is not found."""
        found = [self._name(weight) for weight in weights]
        return tuple(found) if all(found) else ()

    def _name(self, tensor: Tensor) -> str:
        """The name of the parameter that this tensor is or is a view of; empty if there is none."""
        found = []
        for module, name, parameter in self._found:
            if _is_the_whole_of(tensor, parameter):
                # Experts compute on one part of a distributed weight, and so does its index.
                part = "" if _local(parameter) is parameter else ".to_local()"
                found += [f"{path}{name}{part}" for path in self._paths(module, ())]
        return min(found, key=_outermost, default="")

    def path_of(self, module: object) -> str:
        """The name of a module, empty where it is not known or the outermost."""
        paths = self._paths(module, ())
        return min(paths, key=_outermost, default="").removesuffix(".")

    def wrapper_of(self, module: Any, name: str) -> Any:
        """The module that keeps this one under that name, or None."""
        above = self._above.get(id(module), [])
        return next((parent for parent, own in above if own == name), None)

    def _paths(self, module: Any, below: tuple[int, ...]) -> Iterator[str]:
        """What stands before the name of the module's parameters, ending in a dot."""
        above = self._above.get(id(module), [])
        if not above or id(module) in below:
            yield ""
            return
        for parent, name in above:
            own = "" if name == _COMPILED else f"{name}."
            for path in self._paths(parent, (*below, id(module))):
                yield path + own


def _outermost(name: str) -> tuple[int, str]:
    """A module may be part of several: the outermost has the longest name. Of equals any will do,
    but always the same.
    """
    return -name.count("."), name


def _modules() -> list[Any]:
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


def memory_of(tensor: Any) -> int | None:
    """The address of the allocation; None where there is none, and under Paddle, whose callers give
    parameters themselves.
    """
    if IS_PADDLE:
        return None
    try:
        return int(_local(tensor).untyped_storage().data_ptr()) or None
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a parameter that was not made yet, or a tensor without data


def _is_the_whole_of(tensor: Tensor, parameter: Any) -> bool:
    if parameter is tensor:
        return True
    if not shares_memory(parameter, tensor):
        return False
    whole = _local(parameter)
    # Several parameters may be slices of one memory, as sharded models have them.
    place, other = ((one.storage_offset(), one.numel()) for one in (tensor, whole))
    return bool(place == other)


def _common_module(names: Sequence[str]) -> str:
    """The module that all of these parameters are below."""
    parts = [name.removesuffix(".to_local()").split(".")[:-1] for name in names]
    together = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in together)
