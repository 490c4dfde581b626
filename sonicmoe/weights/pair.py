"""Two stacked parameters that change their layout in place, as PaddleFleet's experts do.

| layout | weight1 | weight2 |
|---|---|---|
| grouped | `[E, H, 2I]`, gate half first | `[E, I, H]` |
| Sonic, the native one | `[E, 2I, H]`, gate and up rows in turns | `[E, H, I]` |

The shapes of both weights together tell the layout, once H is known. Where H = 2I weight1 has one
shape in both, and weight2 decides; where H = I it is the other way round. Both cannot be at once,
so no pair is undecidable.
"""

from __future__ import annotations

import weakref

import torch

from ..enums import ActivationType
from ..errors import ShapeError
from ..interop import require_framework_tensor
from ..layouts import NATIVE, WeightLayout
from .parameters import check_parameter
from .stacked import LEGENDS, StackedParameters

Tensor = torch.Tensor
Shape = tuple[int, ...]

GROUPED = WeightLayout(transposed=True, split_half=True)


def layout_of_pair(weight1: Shape, weight2: Shape, hidden: int) -> WeightLayout:
    """The layout of weights of these shapes.

    Raises:
        ShapeError: the shapes fit neither layout, or not `hidden`.
    """
    # Experts of no size have one shape in both layouts.
    if len(weight1) == len(weight2) == 3 and weight1[0] == weight2[0] and 0 not in weight2:
        experts = weight2[0]
        if (experts, 2 * weight2[2], hidden) == weight1 and weight2[1] == hidden:
            return NATIVE
        if (experts, hidden, 2 * weight2[1]) == weight1 and weight2[2] == hidden:
            return GROUPED
    sonic, grouped = (" and ".join(LEGENDS[turned]) for turned in (False, True))
    raise ShapeError(
        f"w1 has shape {weight1} and w2 {weight2} with H = {hidden}; needed: {sonic} (Sonic's layout), or {grouped} (grouped)"
    )


class PairParameters(StackedParameters):
    """Two stacked parameters of a gated layer, in the layout that their shapes have at each call.

    They are referenced weakly: who finds a layer by its parameters must not keep them alive.

    The gradient of a weight goes to `main_grad` in the layout of its shape, strides as given. Where
    both layouts give one shape, and for a `main_grad` that is made here, the rule is PaddleFleet's:
    `weight1.main_grad` is converted with its weight and has the weight's layout, and
    `weight2.main_grad` stays grouped, `[E, I, H]`.

    Raises:
        ShapeError, DTypeError, LayoutError: naming the weight.
    """

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
        """`[weight1, weight2]`, and `layout` brought up to date with their shapes.

        Raises:
            ShapeError: their sizes are not those of the first ones.
        """
        weight1, weight2 = (reference() for reference in self._references)
        if weight1 is None or weight2 is None:
            raise RuntimeError("w1 or w2 of this layer was dropped; needed: parameters that live")
        # Nobody announces a conversion. Its shapes show it, at the next look.
        shapes = tuple(weight1.shape), tuple(weight2.shape)
        if shapes != self._shapes:
            layout = layout_of_pair(*shapes, self._native_shapes[0][2])
            self._check(weight1, weight2, layout)
            self.layout, self._shapes = layout, shapes
        return [weight1, weight2]

    def name_of(self, index: int) -> str:
        return f"w{index + 1}"

    def preferred(self, index: int) -> tuple[WeightLayout, WeightLayout]:
        # PaddleFleet converts w1.main_grad with its weight, and never w2's.
        return (GROUPED, NATIVE) if index == 1 else super().preferred(index)
