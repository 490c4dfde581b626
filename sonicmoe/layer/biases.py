"""The biases of the experts of one call of a node. They are inputs of its autograd node, as tokens are,
so that autograd adds their gradients wherever they came from: weights alone have `main_grad`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..engine.interface import Engine, EngineWeights, PendingWgrad
from ..interop import plain_ops, require_framework_tensor, requires_grad
from ..layouts import WeightLayout
from ..refusals import need_shape
from ..weights.parameters import ExpertParameters

Tensor = torch.Tensor


class Biases(NamedTuple):
    """b1 `[E, N1]` and b2 `[E, H]` in fp32; b1 has the order of the rows of w1 in `layout`. dtypes,
    trained: of the caller's, and which of these want a gradient.
    """

    b1: Tensor
    b2: Tensor
    layout: WeightLayout
    dtypes: tuple[torch.dtype, ...]
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, given: tuple[Tensor, Tensor], layer: ExpertParameters) -> Biases:
        """Of the caller's tensors, which may be part of a graph."""
        (experts, n1, hidden), _ = layer.native_shapes()
        for name, bias, width in zip(("b1", "b2"), given, (n1, hidden), strict=True):
            require_framework_tensor(bias, name)
            need_shape(tuple(bias.shape) == (experts, width), name, bias, (experts, width))
        b1, b2 = (bias.detach().to(torch.float32) for bias in given)
        dtypes, trained = (bias.dtype for bias in given), map(requires_grad, given)
        return cls(b1, b2, layer.layout, tuple(dtypes), tuple(trained))

    def native(self) -> tuple[Tensor, Tensor]:
        return self.layout.native_b1(self.b1), self.b2

    def beside(self, weights: EngineWeights) -> EngineWeights:
        """The engine's weights with these biases."""
        # Plain weights may lie as the caller's do, and b1 lies as they do.
        same = weights.layout.split_half == self.layout.split_half
        b1, b2 = (self.b1, self.b2) if same else self.native()
        return replace(weights, b1=b1.contiguous(), b2=b2.contiguous())

    def gradients(self, engine: Engine, pending: PendingWgrad) -> tuple[Tensor | None, ...]:
        """Those of a backward, each as its bias is; None where a bias wants none. They are
        complete, whatever becomes of the weights'.
        """
        if not any(self.trained):
            return None, None
        with plain_ops():
            db1, db2 = engine.bias_gradients(pending)
            sums = self.layout.ordered_b1(db1, pending.split_half), db2
            each = zip(sums, self.dtypes, self.trained, strict=True)
            return tuple(gradient.to(d) if trains else None for gradient, d, trains in each)
