"""The products of a layer with low-rank adapters, for engines without kernels for these: what an
engine multiplies by itself, and PyTorch's grouped GEMMs for the narrow products (`low_rank.py`).

An adapter of the up-projection comes before the activation, and one of the down-projection before
the activation's gradient. There both are plain operations, on z and dy1 in the dtype of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..layouts import NATIVE, WeightLayout
from ..routing.combine import scatter_to_slots
from .activations import activate, activate_backward
from .products import Products, empty_rows, plain_operand
from .settings import EngineSettings

Tensor = torch.Tensor
UP, DOWN = 0, 1


class AdaptedProducts:
    """The products of a layer with adapters; those without are the products of `inner`.

    projected: `Saved.projected`, of which the forward writes every column.
    """

    def __init__(self, inner: Products, settings: EngineSettings, projected: Tensor) -> None:
        self._inner, self._projected = inner, projected
        self._activation = settings.activation, settings.activation_parameters
        weights, routing = inner.weights, inner.routing
        assert weights.adapters is not None and weights.layout == NATIVE
        self._pairs, self._routing = weights.adapters, routing
        self._factors: list[Any] = [pair and pair.operands(projected.dtype) for pair in self._pairs]
        self._ends = routing.padded_offsets[1:].to(torch.int32)
        self._real = (routing.row_token >= 0).unsqueeze(-1)
        # Columns of dz: gates and then up values, or in turns as those of z and the rows of w1.
        self._dz = WeightLayout(split_half=inner.splits_dz)
        self._of_up: tuple[Tensor, ...] = ()
        self._of_down: tuple[Tensor, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor | None) -> None:
        if self._factors[UP] is None:
            self._inner.up(x, z, y1)
            return
        z = empty_rows(self._routing, self._inner.weights.n1, x) if z is None else z
        self._inner.up_again(x, z)
        # A second time, for the backward, it is in `projected` already.
        z += self._added(UP, self._rows(x), keep=y1 is not None)
        if y1 is not None:
            y1.copy_(activate(z.float(), *self._activation))

    def up_again(self, x: Tensor, z: Tensor) -> None:
        if self._factors[UP] is None:
            self._inner.up_again(x, z)
        else:
            self.up(x, z, None)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        self._inner.down(y1, y2)
        if self._factors[DOWN] is not None:
            y2 += self._added(DOWN, y1)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """With an adapter of the down-projection: sums of whole rows, `<dout, b2>` included."""
        if self._factors[DOWN] is None:
            return self._inner.dgated(dout, z, dz, y1s)
        weights, routing = self._inner.weights, self._routing
        rows, (a, b) = self._rows(dout), self._factors[DOWN]
        v = self._product(rows, b) * self._pairs.scales[DOWN]
        dy1 = self._product(rows, plain_operand(weights.w2_dgrad)) + self._product(v, a)
        dy1, prob = dy1.float(), routing.row_prob.unsqueeze(-1)
        y1, found = activate_backward(z.float(), dy1 * prob, *self._activation)
        sums = (dy1 * y1).sum(-1)
        if weights.b2 is not None:
            row = torch.arange(routing.num_rows, device=z.device)
            expert = torch.bucketize(row, routing.padded_offsets[1:-1], right=True)
            sums += (rows.float() * weights.b2[expert]).sum(-1)
        # Selected and not multiplied by 0: nobody has written the rows beyond those of the experts.
        dz.copy_(self._dz.user_b1(torch.where(self._real, found, 0.0)))
        y1s.copy_(torch.where(self._real, y1 * prob, 0.0))
        self._of_down = v, y1s, dout
        return sums

    def dprobs(self, partials: Tensor, dout: Tensor) -> Tensor:
        if self._factors[DOWN] is None:
            return self._inner.dprobs(partials, dout)
        return scatter_to_slots(partials, self._routing)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        self._inner.dgrad(dz, dx_rows)
        if self._factors[UP] is not None:
            a, b = self._factors[UP]
            v = self._product(dz, self._dz.user_w1(b)) * self._pairs.scales[UP]
            dx_rows += self._product(v, a)
            self._of_up = v, dz

    def gradients(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """`PendingWgrad.adapters`, after a backward to x. grouped_mm sums in fp32 and rounds to the
        dtype of the tokens.
        """
        found: list[Tensor | None] = [None] * 4
        of_up, of_down = self._projected.split(self._pairs.widths, 1)
        if self._of_up:
            v, dz = self._of_up
            db = self._dz.native_w1(self._product(dz.T, of_up))
            found[:2] = self._product(v.T, self._rows(x)), db
        if self._of_down:
            v, y1s, dout = self._of_down
            u = (of_down.float() * self._routing.row_prob.unsqueeze(-1)).to(v.dtype)
            found[2:] = self._product(v.T, y1s), self._product(self._rows(dout).T, u)
        return self._pairs.cut(found)

    def _rows(self, tokens: Tensor) -> Tensor:
        """Gathered, with zeros in padding rows."""
        rows = tokens.index_select(0, self._routing.row_token.clamp(min=0))
        return torch.where(self._real, rows, 0.0)

    def _product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=self._ends)

    def _added(self, side: int, rows: Tensor, keep: bool = True) -> Tensor:
        """The part of a side's pair in the projection of `rows`; keep: its u in `projected`."""
        a, b = self._factors[side]
        u = self._product(rows, a.transpose(1, 2)) * self._pairs.scales[side]
        if keep:
            self._projected.split(self._pairs.widths, 1)[side].copy_(u)
        return self._product(u, b.transpose(1, 2))
