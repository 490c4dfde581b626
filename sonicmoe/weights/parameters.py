"""Adapters of the user's parameters: in which tensors the weights of E experts lie, and how.

| arrangement | up | down | adapter |
|---|---|---|---|
| ERNIE's, Fleet's modules | E of `[H, 2I]`, gate first | E of `[I, H]` | `PerExpertParameters` |
| Megatron-Core's | E of `[2I, H]`, gate first | E of `[H, I]` | `NumberedParameters` |
| fused | `[E, H, 2I]`, gate first | `[E, I, H]` | `stacked.FusedParameters` |
| native | `[E, 2I, H]`, in turns | `[E, H, I]` | `stacked.FusedParameters` |
| one or the other, by turns | | | `stacked.PairParameters` |
| the functional API's | stacked, as a `WeightLayout` says | the same | `WeightSource.stacked` |
| the same, as its gradients see it | | | `stacked.PassedParameters` |

Parameters are never rebound, copied over or written; gradients are added in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from ..engine.activations import pre_activation_width
from ..engine.gradient_places import GradientPlaces
from ..engine.settings import GradientMode
from ..engine.targets import GradientTargets
from ..enums import ActivationType, is_glu
from ..errors import LayoutError, expect
from ..interop import IS_PADDLE, data_ptr, holds_memory, require_framework_tensor
from ..layouts import WeightLayout
from ..refusals import need_dtype, need_shape
from ..weight_source import WeightSource, same_objects

Tensor = torch.Tensor
Matrices = tuple[int, int, int]

PARAMETER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertParameters(ABC):
    """The node's weights in one of the arrangements: up `[H, N1]`, gate half first, down `[I, H]`.

    activation: decides whether up has two halves.
    layout: how each parameter lies.
    has_biases: whether gradients of biases follow those of the weights.
    are_separate: whether each expert has weights of its own.
    keeps_its_layout: whether no parameter changes its layout in place.
    is_passed: whether the parameters are records of what one call was given.
    native_shapes: of `native()`.
    """

    native_shapes: tuple[Matrices, Matrices]

    has_biases = False
    is_passed = False
    are_separate = False
    keeps_its_layout = True

    def __init__(self, activation: ActivationType) -> None:
        """Subclasses check the parameters."""
        self.activation = activation
        self.layout = WeightLayout(transposed=True, split_half=is_glu(activation))

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Every parameter, in a fixed order."""

    def native(self) -> tuple[Tensor, Tensor]:
        """Native copies `(w1 [E, N1, H], w2 [E, H, I])` in the parameters' dtype; `LayoutError`
        where they hold no memory.
        """
        check_memory(self.parameters())
        return self.source().native()[:2]

    @abstractmethod
    def name_of(self, index: int) -> str:
        """What the caller calls the parameter at this place, for messages."""

    @abstractmethod
    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        """Where the weights lie, one matrix per expert and projection; `parameters`: what
        `parameters()` has just returned.
        """

    def place(self, parameters: Sequence[Tensor]) -> tuple[Any, ...]:
        """Where and how the weights lie: the layout, every address, the dtype."""
        # A parameter that changes its layout in place keeps its address.
        return self.layout, *map(data_ptr, parameters), parameters[0].dtype

    def destined(self, index: int, parameter: Tensor) -> WeightLayout:
        """The layout in which the gradient of the parameter at this place leaves: that of `main_grad`
        where there is one, else the parameter's.
        """
        return self.layout

    def fresh_shape(self, index: int, parameter: Tensor) -> tuple[int, ...]:
        """The shape of a `main_grad` that is made for the parameter at this place."""
        return tuple(parameter.shape)

    @abstractmethod
    def targets(
        self, memory: Sequence[Tensor | None], mode: GradientMode = GradientMode.MAIN_GRAD
    ) -> GradientTargets:
        """Targets over memory of each parameter's gradient, in the order of `parameters()`; None for
        those that are frozen. Fresh memory has dtype and layout of each parameter, and the other kind
        is `main_grad`.
        """


def _local(experts: Sequence[Any]) -> list[Any]:
    return [expert for expert in experts if expert is not None]


_MODULES = "_sub_layers" if IS_PADDLE else "_modules"
_NAMES = ("up_gate_proj", "down_proj")
_PARTS, _PARAMETERS = attrgetter(_MODULES), attrgetter("_parameters")
_UP, _DOWN, _WEIGHT = itemgetter(_NAMES[0]), itemgetter(_NAMES[1]), itemgetter("weight")


def _projections_of(experts: Sequence[Any]) -> list[Any]:
    """`expert.<name>` as the modules hold them now: all up, then all down.

    A module finds its parts in `__getattr__`, after every other look-up has failed. Two weights of
    every expert are read in every forward, so they are looked up where modules keep them, and by
    attribute only where one is not there (a parametrized weight, an expert that is no module).
    """
    try:
        parts = list(map(_PARTS, experts))
        # By `map`, which takes half the time of a loop.
        return [*map(_UP, parts), *map(_DOWN, parts)]
    except (AttributeError, KeyError, TypeError):
        return [getattr(expert, name, None) for name in _NAMES for expert in experts]


def _weights_of(projections: Sequence[Any]) -> list[Tensor]:
    try:
        # By index, as the module does itself: a sharded model's own dictionary gathers a weight
        # then.
        weights = list(map(_WEIGHT, map(_PARAMETERS, projections)))
    except (AttributeError, KeyError, TypeError):
        weights = [None]
    if any(map(is_, weights, repeat(None))):
        return [projection.weight for projection in projections]
    return weights


class SeparateParameters(ExpertParameters):
    """A parameter of each expert and projection: those of the up-projections, then the others."""

    are_separate = True

    def __init__(
        self, activation: ActivationType, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        super().__init__(activation)
        width = pre_activation_width(intermediate_size, activation)
        self._count, hidden = int(num_experts), int(hidden_size)
        self.native_shapes = (
            (self._count, width, hidden),
            (self._count, hidden, int(intermediate_size)),
        )

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        # A tuple, because `WeightSource.anchor` recognises one faster than it recognises a class.
        weights, experts = tuple(parameters or self.parameters()), self._count
        return WeightSource(weights[:experts], weights[experts:], self.layout)

    def targets(
        self, memory: Sequence[Tensor | None], mode: GradientMode = GradientMode.MAIN_GRAD
    ) -> GradientTargets:
        halves = memory[: self._count], memory[self._count :]
        up, down = (GradientPlaces.per_expert(half, self.layout) for half in halves)
        return GradientTargets(up, down, mode)


class PerExpertParameters(SeparateParameters):
    """ERNIE / Fleet modules: `expert.up_gate_proj.weight [H, 2I]` (split-half, gate first) and
    `expert.down_proj.weight [I, H]`.

    Args:
        experts: modules in local-id order; `None` entries (experts of other ranks) are skipped.
        num_experts, hidden_size, intermediate_size: what the weights must match.
    """

    def __init__(
        self,
        experts: Sequence[Any],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationType,
    ) -> None:
        super().__init__(activation, num_experts, hidden_size, intermediate_size)
        _, width, _ = self.native_shapes[0]
        self._shapes = ((hidden_size, width), (intermediate_size, hidden_size))
        self._given = experts
        self._seen = list(experts)
        self._experts = self._checked(_local(experts), num_experts)
        self._projections = _projections_of(self._experts)

    def _checked(self, local: list[Any], num_experts: int) -> list[Any]:
        # A rank without experts would have no weight from which to tell device and dtype.
        expect(
            num_experts > 0,
            LayoutError,
            f"n_experts is {num_experts}; needed: at least one local expert",
        )
        expect(
            len(local) == num_experts,
            LayoutError,
            f"experts holds {len(local)} local modules ({len(self._given)} entries, None = another "
            f"rank's); n_experts is {num_experts}"
            + (f"; pass the number of local experts ({len(local)})" if local else ""),
        )
        up_shape, down_shape = self._shapes
        for index, expert in enumerate(local):
            legend = "[H, 2I]" if is_glu(self.activation) else "[H, I]"
            wanted = (up_shape, legend), (down_shape, "[I, H]")
            for name, (shape, axes) in zip(_NAMES, wanted, strict=True):
                projection, place = _projection(expert, index, name), f"experts[{index}].{name}"
                check_parameter(projection.weight, f"{place}.weight", shape, axes)
                _refuse_others(projection, place)
        return local

    def parameters(self) -> list[Tensor]:
        """up_gate of every expert, then down of every expert.

        Read in every call, because modules may replace their weights, and the caller's list its
        modules. A new module is checked as the first ones were.
        """
        given = list(self._given)
        if not same_objects(given, self._seen):
            self._experts = self._checked(_local(given), len(self._experts))
            self._seen = given
        projections = _projections_of(self._experts)
        if not all(map(is_, projections, self._projections)):
            for index, projection in enumerate(projections):
                _refuse_others(projection, self.name_of(index).removesuffix(".weight"))
            self._projections = projections
        return _weights_of(projections)

    def name_of(self, index: int) -> str:
        expert, is_down = index % len(self._experts), index >= len(self._experts)
        return f"experts[{expert}].{'down_proj' if is_down else 'up_gate_proj'}.weight"


class NumberedParameters(SeparateParameters):
    """Megatron-Core's grouped experts, two modules with a parameter of every expert each:
    `up.weight{i} [2I, H]`, gate rows first, and `down.weight{i} [H, I]`; `[I, H]` without a gate.

    Args:
        up, down: the modules.
        names: what the caller calls them, for messages.
        through_autograd: autograd gets every gradient, also where a parameter has `main_grad`.
    """

    def __init__(
        self,
        up: Any,
        down: Any,
        sizes: Sequence[int],
        activation: ActivationType,
        *,
        names: tuple[str, str] = ("up", "down"),
        through_autograd: bool = False,
    ) -> None:
        """`sizes`: E, H, I, which the weights must match."""
        super().__init__(activation, *sizes)
        self.layout = WeightLayout(split_half=is_glu(activation))
        self._modules, self._names = (up, down), names
        self._through_autograd = through_autograd
        self._seen: Sequence[Tensor] = ()
        self.parameters()

    def parameters(self) -> list[Tensor]:
        """What the modules hold now: Megatron-FSDP puts other tensors there. Each is checked when it is
        seen for the first time.
        """
        held = [
            module._parameters[f"weight{expert}"]
            for module in self._modules
            for expert in range(self._count)
        ]
        if not same_objects(held, self._seen):
            self._check(held)
            self._seen = held
        # A view has no `main_grad`, and passes its gradient on.
        return [weight.view_as(weight) for weight in held] if self._through_autograd else held

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        """The parameters themselves: FSDP may give one other memory between a forward and its backward,
        and a view of it stays where it was.
        """
        return super().source(self._seen)

    def _check(self, weights: Sequence[Tensor]) -> None:
        (_, *up), (_, *down) = self.native_shapes
        first = "[2I, H]" if is_glu(self.activation) else "[I, H]"
        for index, weight in enumerate(weights):
            shape, legend = (up, first) if index < self._count else (down, "[H, I]")
            check_parameter(weight, self.name_of(index), tuple(shape), legend)

    def name_of(self, index: int) -> str:
        return f"{self._names[index >= self._count]}.weight{index % self._count}"


def check_memory(parameters: Sequence[Tensor]) -> None:
    """Refuse weights on the meta device, and weights whose memory the framework has freed."""
    # A model that is built without memory is on the meta device as a whole, or one of its two
    # projections is: the first and the last of these.
    if not IS_PADDLE and (parameters[0].is_meta or parameters[-1].is_meta):
        raise LayoutError(
            "the experts' weights are on the meta device and hold no memory; needed: weights "
            "made real before the forward, and a node of stacked parameters given them as (module, "
            "name), or made after that, because it keeps the tensors it was given"
        )
    if not IS_PADDLE and any(hasattr(parameter, "to_local") for parameter in parameters):
        raise LayoutError(
            "the experts' weights are DTensors, of which this rank has parts; needed: fully_shard of "
            "the module whose forward calls the node, and of none inside it, and calls by way of it"
        )
    # Paddle's sharding frees the memory of a weight and keeps the tensor. Nothing else may be asked
    # of such a tensor, not even its device.
    if all(map(holds_memory, parameters)):
        return
    freed = [index for index, parameter in enumerate(parameters) if not holds_memory(parameter)]
    raise LayoutError(
        f"weights {freed} of the experts hold no memory; a forward needs all of them, or FP8 copies that were made before "
        "their memory was freed"
    )


def _projection(expert: Any, index: int, name: str) -> Any:
    module = getattr(expert, name, None)
    if module is not None and getattr(module, "weight", None) is not None:
        return module
    raise LayoutError(
        f"experts[{index}] ({type(expert).__name__}) has no {name}.weight; needed: gate and up in one "
        "up_gate_proj.weight [H, 2I], gate first, and down_proj.weight [I, H]"
    )


def _refuse_others(projection: Any, place: str) -> None:
    """Refuse a bias, and adapters: the node would compute without them, and they would never train."""
    expect(
        getattr(projection, "bias", None) is None,
        LayoutError,
        f"{place} has a bias; the node computes without: needed: bias_attr=False (bias=False)",
    )
    named = getattr(projection, "named_parameters", None)
    names = [name for name, _ in named()] if named else []
    # What `weight` itself is computed from trains.
    others = [n for n in names if n != "weight" and not n.startswith("parametrizations.weight.")]
    words = f"{place} ({type(projection).__name__}) has parameters beside its weight, {others}"
    needed = "adapters merged into the weight, or none on experts"
    expect(not others, LayoutError, f"{words}; the node computes without: needed: {needed}")


def check_parameter(weight: Any, name: str, shape: tuple[int, ...], legend: str) -> None:
    """Refuse what is no contiguous leaf of this shape in a dtype that engines read."""
    require_framework_tensor(weight, name)
    need_dtype(name, weight, *PARAMETER_DTYPES)
    # A square matrix in the wrong orientation has the right shape and cannot be told apart. All
    # others get the hint.
    found, transposed = tuple(weight.shape), (*shape[:-2], shape[-1], shape[-2])
    is_turned = found == transposed != shape
    hint = "; it looks transposed: torch.nn.Linear stores [out, in]" if is_turned else ""
    need_shape(found == shape, name, weight, f"{legend} = {shape}{hint}")
    expect(
        # Autograd fills `.grad` of leaves only, and the flush would write where nobody looks.
        weight.is_leaf,
        LayoutError,
        f"{name} is the result of an operation; needed: a leaf parameter, whose gradient can be kept",
    )
    expect(
        weight.is_contiguous(),
        LayoutError,
        f"{name} is not contiguous; needed: a contiguous {legend} parameter",
    )
