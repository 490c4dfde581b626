"""Low-rank adapters in BF16 on Hopper: the narrow products before each GEMM, whose last stages
multiply them with the other factor, and the factors' gradients (`kernels/cuda/low_rank.cu`).

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..interop import empty
from ..kernels.cuda_wgrad import low_rank_source
from ..layouts import WeightLayout
from ..observe import stage
from ..routing.backends import arch_of
from ..routing.metadata import RoutingMetadata
from .factor_operands import FactorOperands
from .low_rank import Adapters, Narrow

Tensor = torch.Tensor
# The operands of a GEMM without an adapter.
NOTHING: tuple[Tensor | None, Tensor | None] = (None, None)


@functools.lru_cache(maxsize=16)
def narrow_kernels(device: str) -> Any:
    """The loaded module; errors as `CudaSource.load`."""
    return low_rank_source(arch_of(device)).load()


class RowsOfAdapters:
    """Those of one forward, or of one backward to the tokens.

    u: as the forward has filled it, or will. halves: the columns of z and dz are gates and then up
    values, else in turns as the rows of `up.b`.
    """

    def __init__(
        self,
        adapters: Adapters,
        routing: RoutingMetadata,
        u: Tensor,
        halves: bool,
        kernels: Any,
        stream: int,
    ) -> None:
        self._adapters, self._routing, self._stream = adapters, routing, stream
        self._kernels, self._order = kernels, WeightLayout(split_half=halves)
        self._u = Narrow.within(u, adapters.widths)
        self._v: dict[str, Tensor] = {}
        self._dz: Tensor | None = None
        self._of_down: tuple[Tensor, Tensor] | None = None
        self._factors = {
            side: FactorOperands(pair, u.dtype, kernels.prepare_factor, stream)
            for side, pair in zip(adapters._fields, adapters, strict=True)
            if pair is not None
        }

    def projected(
        self, side: str, rows: Tensor, gathers: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """u of a projection, filled, and the factor it is multiplied with, `[E, N_out, width]`."""
        if side not in self._factors:
            return NOTHING
        factors, u = self._factors[side], getattr(self._u, side)
        self._narrow(side, rows, gathers, factors.straight("a"), u)
        return u, factors.straight("b")

    def returned(
        self, side: str, rows: Tensor, gathers: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """v of a gradient, and the factor it is multiplied with, `[E, N_in, width]`."""
        if side not in self._factors:
            return NOTHING
        factors = self._factors[side]
        b = factors.transposed("b")
        if side == "up":
            # Columns of dz lie as the caller's rows do.
            self._dz, b = rows, self._order.user_b1(b)
        v = empty((self._routing.num_rows, int(b.shape[1])), b.dtype, b.device)
        self._narrow(side, rows, gathers, b, v)
        self._v[side] = v
        return v, factors.transposed("a")

    def keep(self, dout: Tensor, y1s: Tensor) -> None:
        """Keep these operands for the gradients of the down-projection's factors."""
        self._of_down = dout, y1s

    def gradients(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """`PendingWgrad.adapters`, after a backward to x."""
        found: list[Tensor | None] = [None] * 4
        with stage("low_rank"):
            if "up" in self._v:
                assert self._dz is not None
                db = self._sum("up", self._dz, self._u.up, wide_first=True)
                found[:2] = (
                    self._sum("up", x, self._v["up"], gathers=True),
                    self._order.native_w1(db),
                )
            if "down" in self._v:
                assert self._of_down is not None
                dout, y1s = self._of_down
                prob = self._routing.row_prob
                db = self._sum("down", dout, self._u.down, gathers=True, wide_first=True, prob=prob)
                found[2:] = self._sum("down", y1s, self._v["down"]), db
        return self._adapters.cut(found)

    def _narrow(self, side: str, rows: Tensor, gathers: bool, factor: Tensor, out: Tensor) -> None:
        routing, by = self._routing, float(getattr(self._adapters, side).scale)
        where = routing.row_token, routing.padded_offsets
        with stage("low_rank"):
            self._kernels.narrow_rows(rows, None, gathers, factor, *where, out, by, self._stream)

    def _sum(
        self,
        side: str,
        rows: Tensor,
        narrow: Tensor | None,
        *,
        gathers: bool = False,
        wide_first: bool = False,
        prob: Tensor | None = None,
    ) -> Tensor:
        """fp32 sums over each expert's rows of narrow^T rows `[E, r, N]`, or of rows^T narrow."""
        assert narrow is not None
        pair, routing = getattr(self._adapters, side), self._routing
        sides = int(rows.shape[1]), int(narrow.shape[1]), int(pair.a.shape[1])
        sizes = routing.num_rows, routing.num_experts, *sides
        out = torch.empty_like(pair.b if wide_first else pair.a, dtype=torch.float32)
        parts = empty((int(self._kernels.gradient_parts(*sizes)),), torch.float32, narrow.device)
        where = routing.row_token, routing.padded_offsets
        self._kernels.narrow_gradient(
            *(rows, None, gathers, False, narrow, prob, *where, wide_first, parts, out),
            self._stream,
        )
        return out
