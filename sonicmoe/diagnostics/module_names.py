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
from .callers import NATIVE_AXES, Caller, Named

Tensor = torch.Tensor

_COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wraps


def caller_of(call: ExpertCall) -> Caller:
    """Names from the model where its modules hold the weights, else those of the arguments."""
    owners = _Owners(list(itertools.chain(*call.weights.values())))
    module = owners.path_of(call.module)
    found = {name: owners.named(call.weights[name], _axes(call, name)) for name in call.weights}
    weights = {name: named or _argument(call, name, module) for name, named in found.items()}
    owned = [name for named in found.values() if named is not None for name in named.names]
    return Caller(
        call.face,
        {**_tokens(call), **weights},
        module or _common_module(owned),
        call.layout.split_half,
        tuple(call.lead or ()),
    )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same tensor, or views of the same memory."""
    if one is other:
        return True
    memory = memory_of(one)
    return memory is not None and memory == memory_of(other)


def _tokens(call: ExpertCall) -> dict[str, Named]:
    """x, out and probs, which have the names of arguments."""
    face = FACES[call.face]
    # A compiled graph does not tell how the tokens lay before they were made one axis.
    known = call.lead is not None or not face.flattens
    return {
        "x": Named((face.x,), NATIVE_AXES["x"] if known else ""),
        "out": Named((face.out,), NATIVE_AXES["out"] if known else ""),
        "probs": Named((face.probs,), NATIVE_AXES["probs"] if face.indexed_probs else ""),
    }


def _axes(call: ExpertCall, name: str) -> str:
    """The axes of a weight as the call gives it, stacked or one per expert."""
    axes = NATIVE_AXES[name]
    if call.layout.transposed and len(axes) == 3:
        axes = axes[0] + axes[2] + axes[1]
    return axes if len(call.weights[name]) == 1 else axes.removeprefix("E")


def _argument(call: ExpertCall, name: str, module: str) -> Named:
    """A weight that no module holds: by its argument, or by the attribute of `module`."""
    face, count = FACES[call.face], len(call.weights[name])
    axes = dict(zip(("w1", "w2"), face.axes or (), strict=False)).get(name, _axes(call, name))
    names = _of_node(name, count) if call.face == NODE else (str(getattr(face, name)),)
    prefix = f"{module}." if module else ""
    return Named(tuple(prefix + own for own in names), axes)


def _of_node(name: str, count: int) -> tuple[str, ...]:
    if count == 1:
        return ("weight1" if name == "w1" else "weight2",)
    part = "up_gate_proj" if name == "w1" else "down_proj"
    return tuple(f"experts[{expert}].{part}.weight" for expert in range(count))


class _Owners:
    """The parameters of all modules that may be some of these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
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

    def named(self, weights: Sequence[Tensor], axes: str) -> Named | None:
        """A weight, stacked or one per expert, by the parameters; None where one is not found."""
        found = [self._owner(weight, axes) for weight in weights]
        names = tuple(owned[0] for owned in found if owned is not None)
        # Of one weight every expert has the same axes.
        return Named(names, found[0][1]) if found[0] and len(names) == len(found) else None

    def _owner(self, tensor: Tensor, axes: str) -> tuple[str, str] | None:
        """The name of the parameter that this tensor is or is a view of, and the parameter's axes
        where the tensor's are these.
        """
        found = []
        for module, name, parameter in self._found:
            order = _order(parameter, tensor, axes)
            if order is not None:
                # Experts compute on one part of a distributed weight, and so does its index.
                part = "" if _local(parameter) is parameter else ".to_local()"
                found += [(f"{path}{name}{part}", order) for path in self._paths(module, ())]
        return min(found, key=lambda owned: _outermost(owned[0]), default=None)

    def path_of(self, module: object) -> str:
        """The name of a module, empty where it is not known or the outermost."""
        paths = self._paths(module, ())
        return min(paths, key=_outermost, default="").removesuffix(".")

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


def _order(parameter: Any, tensor: Tensor, axes: str) -> str | None:
    """The axes of the parameter, whose elements are those of the tensor; None where they are not."""
    if parameter is tensor:
        return axes
    if not shares_memory(parameter, tensor):
        return None
    whole = _local(parameter)
    for order in itertools.permutations(range(len(axes))):
        turned = tensor.permute(order)
        if (turned.shape, turned.stride()) == (whole.shape, whole.stride()):
            # Else it is another slice of the same memory.
            same = turned.storage_offset() == whole.storage_offset()
            return "".join(axes[axis] for axis in order) if same else None
    return None


def _common_module(names: Sequence[str]) -> str:
    """The module that all of these parameters are below."""
    parts = [name.removesuffix(".to_local()").split(".")[:-1] for name in names]
    together = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in together)
