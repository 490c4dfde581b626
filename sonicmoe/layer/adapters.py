"""The low-rank adapters of one call of a node. Their factors are inputs of its autograd node behind
all others, as biases are, and autograd adds their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..engine.interface import PendingWgrad
from ..engine.low_rank import Adapters
from ..interop import plain_ops, requires_grad
from ..layouts import WeightLayout

Tensor = torch.Tensor


class CallAdapters(NamedTuple):
    """given: by the caller, with rows of `up.b` in the order of those of w1, as layout says.
    factors: of given, all that there are.
    """

    given: Adapters
    layout: WeightLayout
    factors: tuple[Tensor, ...]

    @classmethod
    def of(cls, given: Adapters, layout: WeightLayout) -> CallAdapters:
        """layout: of the layer's weights."""
        rows = WeightLayout(split_half=layout.split_half)  # b is not transposed as weights may be
        return cls(given, rows, _present(given.factors))

    def native(self) -> Adapters:
        with plain_ops():
            return self.given.native(self.layout)

    def gradients(self, pending: PendingWgrad) -> tuple[Tensor | None, ...]:
        """Of each factor in its dtype."""
        if pending.adapters is None or not any(map(requires_grad, self.factors)):
            return (None,) * len(self.factors)
        da1, db1, *of_down = pending.adapters()
        with plain_ops():
            db1 = None if db1 is None else self.layout.user_w1(db1)
            each = zip(_present((da1, db1, *of_down)), self.factors, strict=True)
            return tuple([gradient.to(factor.dtype) for gradient, factor in each])


def _present(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in tensors if tensor is not None])
