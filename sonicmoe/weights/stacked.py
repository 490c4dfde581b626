"""Stacked parameters: one tensor of all experts for each projection, in one of two layouts. Those of
PaddleFleet change theirs in place (`PairParameters`).

| layout | weight1 | weight2 |
|---|---|---|
| grouped, in PaddleFleet's words | `[E, H, 2I]`, gate half first | `[E, I, H]` |
| native | `[E, 2I, H]`, gate and up rows in turns | `[E, H, I]` |

The shapes of both weights together tell the layout, once H is known. Where H = 2I weight1 has one
shape in both, and weight2 decides; where H = I it is the other way round. Both cannot be at once,
so no pair is undecidable.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from ..engine.activations import pre_activation_width
from ..engine.gradient_places import GradientPlaces
from ..engine.settings import GradientMode
from ..engine.targets import GradientTargets
from ..enums import ActivationType, is_glu
from ..errors import ShapeError, expect
from ..interop import require_framework_tensor
from ..layouts import NATIVE, WeightLayout
from ..refusals import need_shape
from ..weight_source import WeightSource
from .parameters import ExpertParameters, Matrices, check_parameter

Tensor = torch.Tensor

StackedWeight = Tensor | tuple[Any, str]
Shape = tuple[int, ...]

GROUPED = WeightLayout(transposed=True, split_half=True)
# Of gated weights, by whether they are transposed.
LEGENDS = {True: ("[E, H, 2I]", "[E, I, H]"), False: ("[E, 2I, H]", "[E, H, I]")}


def _sizes(weight: Tensor) -> Shape:
    return tuple(int(size) for size in weight.shape)


def _ungated(legends: tuple[str, str]) -> tuple[str, str]:
    return legends[0].replace("2I", "I"), legends[1]


def _turned(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1])


class StackedParameters(ExpertParameters):
    """Two stacked parameters in one of the layouts of the table above.

    `main_grad` may have the other layout than its weight, each of the two by itself. Its shape
    tells which. Where both layouts give one shape (H = 2I for the first weight, H = I for the
    second), it is the layout of the weight.
    """

    def _keep_sizes(self, up: Shape, down: Shape) -> None:
        """Keep the sizes of the first weights in `layout`; other sizes are refused later."""
        if self.layout.transposed:
            up, down = _turned(up), _turned(down)
        self.native_shapes = up, down  # type: ignore[assignment]

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        weight1, weight2 = parameters or self.parameters()
        return WeightSource.stacked(weight1, weight2, layout=self.layout)

    def name_of(self, index: int) -> str:
        return f"weight{index + 1}"

    def preferred(self, index: int) -> tuple[WeightLayout, WeightLayout]:
        """The layouts of the gradient of the weight at this place, in the order in which they are
        tried; memory that is made for it has the first.
        """
        return self.layout, NATIVE if self.layout.transposed else self._fused

    @functools.cached_property
    def _fused(self) -> WeightLayout:
        return WeightLayout(transposed=True, split_half=is_glu(self.activation))

    def shape_in(self, layout: WeightLayout, index: int) -> tuple[int, ...]:
        """The shape of the first or of the second weight in that layout."""
        experts, rows, columns = self.native_shapes[index]
        if layout.apart and index == 0:
            return 2, experts, rows // 2, columns
        return (experts, columns, rows) if layout.transposed else (experts, rows, columns)

    def gradient_layout(self, index: int, memory: Tensor | None) -> WeightLayout:
        """How the gradient of the first or the second weight lies in `memory`; the first of
        `preferred` where there is none. Memory of another shape is refused by those who add there.
        """
        layouts = self.preferred(index)
        if memory is None:
            return layouts[0]
        shape = tuple(memory.shape)
        for layout in layouts:
            if self.shape_in(layout, index) == shape:
                return layout
        return self.layout

    def fresh_shape(self, index: int, parameter: Tensor) -> tuple[int, ...]:
        return self.shape_in(self.preferred(index)[0], index)

    def destined(self, index: int, parameter: Tensor) -> WeightLayout:
        """Autograd and `.grad` want the parameter's layout."""
        if not hasattr(parameter, "main_grad"):
            return self.layout
        return self.gradient_layout(index, parameter.main_grad)

    def targets(
        self, memory: Sequence[Tensor | None], mode: GradientMode = GradientMode.MAIN_GRAD
    ) -> GradientTargets:
        """Two stacked tensors, each in its own layout; fresh memory in that of the weights, also where
        a `main_grad` of that shape might have the other one.
        """
        first, second, *biases = memory
        layouts = self.layout, self.layout
        if mode is not GradientMode.FRESH:
            layouts = self.gradient_layout(0, first), self.gradient_layout(1, second)
        experts = self.native_shapes[0][0]
        up = GradientPlaces.stacked(first, experts, layouts[0])
        down = GradientPlaces.stacked(second, experts, layouts[1])
        return GradientTargets(up, down, mode, (biases[0], biases[1]) if biases else None)


def _current(weight: StackedWeight) -> Tensor:
    # A name, and no function that returns the parameter: a copy of the function would go on reading
    # the module that was copied.
    return getattr(*weight) if isinstance(weight, tuple) else weight  # type: ignore[no-any-return]


class FusedParameters(StackedParameters):
    """Two stacked parameters that keep their layout: grouped, or the native one.

    Each is a parameter, or `(module, name)` of one, which is then looked up in every call: for
    modules that may get another parameter (`load_state_dict(assign=True)`).
    """

    def __init__(
        self,
        weight1: StackedWeight,
        weight2: StackedWeight,
        activation: ActivationType,
        layout: WeightLayout | None = None,
    ) -> None:
        """Check the pair against each other; `layout`: None or the native one."""
        super().__init__(activation)
        self.layout = layout or self.layout
        # Kept as given, and looked up in every call: a module may get another parameter.
        self._given = (weight1, weight2)
        self._weights = self._checked(*map(_current, self._given))
        self._keep_sizes(*map(_sizes, self._weights))

    def _checked(self, weight1: Tensor, weight2: Tensor) -> tuple[Tensor, ...]:
        legends = LEGENDS[self.layout.transposed]
        first, second = legends if is_glu(self.activation) else _ungated(legends)
        for name, weight, legend in (("weight1", weight1, first), ("weight2", weight2, second)):
            require_framework_tensor(weight, name)
            need_shape(len(weight.shape) == 3, name, weight, legend)
        up, down = shapes = _sizes(weight1), _sizes(weight2)
        # One of two that do not fit together would be blamed for the other.
        expect(
            shapes == self._wanted_beside(up, down),
            ShapeError,
            f"weight1 has shape {up} and weight2 {down}; needed: {first} and {second}",
        )
        check_parameter(weight1, "weight1", up, first)
        check_parameter(weight2, "weight2", down, second)
        return weight1, weight2

    def _wanted_beside(self, up: Shape, down: Shape) -> tuple[Shape, Shape]:
        """What both shapes must be, with E and H of the first and I of the second."""
        transposed, experts = self.layout.transposed, up[0]
        hidden, inner = (up[1], down[1]) if transposed else (up[2], down[2])
        width = pre_activation_width(inner, self.activation)
        pair = (experts, width, hidden), (experts, hidden, inner)
        return (_turned(pair[0]), _turned(pair[1])) if transposed else pair

    def parameters(self) -> list[Tensor]:
        """`[weight1, weight2]`, as they are now. New ones are checked as the first ones were."""
        # Usually the very tensors that were checked. Only others are looked at.
        if self._given[0] is self._weights[0] and self._given[1] is self._weights[1]:
            return list(self._weights)
        given = tuple(map(_current, self._given))
        if not all(map(is_, given, self._weights)):
            shapes = [tuple(weight.shape) for weight in self._weights]
            found = [tuple(weight.shape) for weight in self._checked(*given)]
            expect(
                found == shapes,
                ShapeError,
                f"weight1 and weight2 have shapes {found} by now; the node was made for {shapes}",
            )
            self._weights = given
        return list(self._weights)


def layout_of_pair(weight1: Shape, weight2: Shape, hidden: int) -> WeightLayout:
    """The layout of weights of these shapes; a ShapeError where they fit neither."""
    # Experts of no size have one shape in both layouts.
    if len(weight1) == len(weight2) == 3 and weight1[0] == weight2[0] and 0 not in weight2:
        experts = weight2[0]
        if (experts, 2 * weight2[2], hidden) == weight1 and weight2[1] == hidden:
            return NATIVE
        if (experts, hidden, 2 * weight2[1]) == weight1 and weight2[2] == hidden:
            return GROUPED
    sonic, grouped = (" and ".join(LEGENDS[turned]) for turned in (False, True))
    raise ShapeError(
        f"w1 has shape {weight1} and w2 {weight2} with H = {hidden}; "
        f"needed: {sonic} (Sonic's layout), or {grouped} (grouped)"
    )


class PairParameters(StackedParameters):
    """Two stacked parameters of a gated layer, in the layout that their shapes have at each call.
    They are referenced weakly: who finds a layer by its parameters must not keep them alive.

    The gradient of a weight goes to `main_grad` in the layout of its shape, strides as given. Where
    both layouts give one shape, and for a `main_grad` that is made here, the rule is PaddleFleet's:
    `weight1.main_grad` is converted with its weight and has the weight's layout, and
    `weight2.main_grad` stays grouped, `[E, I, H]`.
    """

    keeps_its_layout = False

    def __init__(self, weight1: Tensor, weight2: Tensor, hidden: int) -> None:
        # Which gated activation makes no difference to any layout.
        super().__init__(ActivationType.SWIGLU)
        for name, weight in (("w1", weight1), ("w2", weight2)):
            require_framework_tensor(weight, name)
        self._references = weakref.ref(weight1), weakref.ref(weight2)
        self._shapes = tuple(weight1.shape), tuple(weight2.shape)
        self.layout = layout_of_pair(*self._shapes, hidden)
        self._keep_sizes(*self._shapes)
        self._check(weight1, weight2, self.layout)

    def __reduce__(self) -> str | tuple[object, ...]:
        """A layer of a copied model is found by the copied parameters."""
        raise TypeError(
            "the layer of a pair of parameters belongs to these two tensors and has no copy"
        )

    def _check(self, weight1: Tensor, weight2: Tensor, layout: WeightLayout) -> None:
        for index, (name, weight) in enumerate((("w1", weight1), ("w2", weight2))):
            shape, legend = self.shape_in(layout, index), LEGENDS[layout.transposed][index]
            check_parameter(weight, name, shape, legend)

    def parameters(self) -> list[Tensor]:
        """`[weight1, weight2]`, and `layout` brought up to date with their shapes."""
        weight1, weight2 = (reference() for reference in self._references)
        if weight1 is None or weight2 is None:
            raise RuntimeError("w1 or w2 of this layer was dropped; needed: parameters that live")
        # Nobody announces a conversion. Its shapes show it, at the next look.
        shapes = tuple(weight1.shape), tuple(weight2.shape)
        if shapes != self._shapes:
            layout = layout_of_pair(*shapes, self.native_shapes[0][2])
            self._check(weight1, weight2, layout)
            self.layout, self._shapes = layout, shapes
        return [weight1, weight2]

    def name_of(self, index: int) -> str:
        return f"w{index + 1}"

    def preferred(self, index: int) -> tuple[WeightLayout, WeightLayout]:
        # PaddleFleet converts w1.main_grad with its weight, and never w2's.
        return (GROUPED, NATIVE) if index == 1 else super().preferred(index)


class PassedParameters(StackedParameters):
    """The weights w1, w2 and biases b1, b2 of one call, whose gradients autograd adds up.

    Where w1 is two tensors, gate and up, it has one record and one gradient `[2, E, I, H]`.

    A backward need not have the tensors any more, so records of their shapes and dtypes stand for
    them. These have no `main_grad`, whatever the tensors have.
    """

    is_passed = True

    def __init__(
        self,
        activation: ActivationType,
        layout: WeightLayout,
        native_shapes: tuple[Matrices, Matrices],
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        """`dtypes`: of w1, w2, b1, b2; None where there is no bias."""
        super().__init__(activation)
        self.layout, self.native_shapes = layout, native_shapes
        self.has_biases = dtypes[2] is not None
        (experts, n1, hidden), _ = native_shapes
        of_biases = (experts, n1), (experts, hidden)
        shapes = self.shape_in(layout, 0), self.shape_in(layout, 1), *of_biases
        of_each = zip(shapes, dtypes, strict=True)
        self._records = [_Record(shape, dtype) for shape, dtype in of_each if dtype is not None]

    def parameters(self) -> list[Any]:
        return self._records


class _Record(NamedTuple):
    """What gradients ask of a parameter that one call was given."""

    shape: Shape
    dtype: torch.dtype
    is_leaf: bool = True
