"""The products of a low-rank pair in the reference engine, fp32 (formulas: `low_rank.py`).

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..routing.metadata import RoutingMetadata
from .interface import EngineWeights
from .reference_operands import experts_with_rows, grouped, rounded
from .tokens import Tokens, token_dtype

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class NarrowProducts:
    """The narrow products of one projection. u and v `[R, width]` are fp32, rounded to the dtype of the tokens."""

    a: Tensor
    b: Tensor
    scale: float
    routing: RoutingMetadata

    @property
    def width(self) -> int:
        return int(self.a.shape[1])

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """u, and the pair's part of the projection of `rows`, which are as the GEMM reads them."""
        u = self._narrow(rows, self.a, transpose=True)
        return u, grouped(u, self.b, self.routing, transpose_weight=True)

    def backward(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """v, and what the pair adds to the gradient of the operand; `gradient` of the projection's
        output, as dgrad reads it.
        """
        v = self._narrow(gradient, self.b, transpose=False)
        return v, grouped(v, self.a, self.routing, transpose_weight=False)

    def gradients(
        self, rows: Tensor, v: Tensor, gradient: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """fp32 `(da, db)`; zeros for experts without rows."""
        device = rows.device
        da, db = (
            torch.zeros(f.shape, dtype=torch.float32, device=device) for f in (self.a, self.b)
        )
        for expert, first, count, _ in experts_with_rows(self.routing):
            true = slice(first, first + count)
            da[expert] = v[true].transpose(0, 1) @ rows[true]
            db[expert] = gradient[true].transpose(0, 1) @ u[true]
        return da, db

    def _narrow(self, rows: Tensor, factor: Tensor, *, transpose: bool) -> Tensor:
        product = grouped(rows, factor, self.routing, transpose_weight=transpose)
        return rounded(product * self.scale, self.a.dtype)


def narrow_products(
    weights: EngineWeights, routing: RoutingMetadata, x: Tokens
) -> list[NarrowProducts | None]:
    """The narrow products of the up- and the down-projection; None where there is no adapter."""
    return [
        pair and NarrowProducts(*pair.operands(token_dtype(x)), pair.scale, routing)
        for pair in (weights.adapters or (None, None))
    ]
