"""Low-rank adapters on the projections of frozen experts: `y = x W + b + scale (x A) B` per expert.

The scale is multiplied into the narrow product, so that each pass adds a plain product to its rows:

    forward    u = scale * (x a^T)     y  += u b^T
    backward   v = scale * (dy b)      dx += v a       da = v^T x      db = dy^T u

u and v `[R, width]` are rounded to the dtype of the tokens, as operands of GEMMs are, and a and b
are read in it. No product has the size of a weight.

Legend: r rank of a pair; other letters as in `interface`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import NamedTuple

import torch

from ..errors import ConfigError, expect
from ..interop import plain_ops, require_framework_tensor
from ..layouts import WeightLayout, interleave_gate_up
from ..refusals import need_dtype, need_shape, need_type
from ..routing.metadata import round_up

Tensor = torch.Tensor
MAX_RANK = 128
_COLUMNS = 8  # of bf16 are the 16 bytes that GEMMs read at a time; narrower factors get zeros
NAMES_OF_FACTORS = "up.a", "up.b", "down.a", "down.b"


class LowRank(NamedTuple):
    """The pair of one projection: `a [E, r, N_in]`, `b [E, N_out, r]` in bf16, fp16 or fp32, of any
    strides, and what their product is multiplied by.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def width(self) -> int:
        """Columns of u and v: the rank, rounded up."""
        return round_up(int(self.a.shape[1]), _COLUMNS)

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Contiguous `(a [E, width, N_in], b [E, N_out, width])` as GEMMs read them."""
        experts, rank, inputs = (int(size) for size in self.a.shape)
        shapes = (experts, self.width, inputs), (experts, int(self.b.shape[1]), self.width)
        a, b = (torch.zeros(shape, dtype=dtype, device=self.a.device) for shape in shapes)
        a[:, :rank], b[:, :, :rank] = self.a.detach().to(dtype), self.b.detach().to(dtype)
        return a, b


class Narrow(NamedTuple):
    """u or v `[R, width]` of both projections, contiguous; None where one has no adapter."""

    up: Tensor | None = None
    down: Tensor | None = None

    @classmethod
    def within(cls, memory: Tensor | None, widths: tuple[int, ...]) -> Narrow:
        """One behind the other in memory `[R, sum of widths]`."""
        if memory is None:
            return cls()
        rows, flat, found = int(memory.shape[0]), memory.view(-1), []
        for width, begin in zip(widths, (0, rows * widths[0]), strict=True):
            part = flat[begin : begin + rows * width].view(rows, width) if width else None
            found.append(part)
        return cls(*found)


class Adapters(NamedTuple):
    """The adapters of a layer. Rows of `up.b` have the order of the rows of the caller's w1, and where an
    engine reads them the native one.
    """

    up: LowRank | None = None
    down: LowRank | None = None

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """The factors in the order of `NAMES_OF_FACTORS`; None where a projection has no pair."""
        return tuple([factor for pair in self for factor in (pair or (None, None))[:2]])

    @property
    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The factors that there are, behind their names."""
        for name, factor in zip(NAMES_OF_FACTORS, self.factors, strict=True):
            if factor is not None:
                yield name, factor

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple([0.0 if pair is None else float(pair.scale) for pair in self])

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple([0 if pair is None else pair.width for pair in self])

    @classmethod
    def of(cls, factors: Sequence[Tensor | None], scales: Sequence[float]) -> Adapters:
        """The inverse of `factors` and `scales`."""
        each = zip(factors[::2], factors[1::2], scales, strict=True)
        return cls(*[None if a is None or b is None else LowRank(a, b, s) for a, b, s in each])

    def cut(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """fp32 gradients of `factors`, of those of their `operands`; None counts as zeros."""

        def own(factor: Tensor | None, gradient: Tensor | None) -> Tensor | None:
            if factor is None or gradient is None:
                return None if factor is None else torch.zeros_like(factor, dtype=torch.float32)
            return gradient[:, : factor.shape[1], : factor.shape[2]].to(torch.float32)

        return tuple(map(own, self.factors, gradients))

    def native(self, layout: WeightLayout) -> Adapters:
        """With `up.b` in native order, by operations that autograd sees. A pair that has no such order stays
        as it is, because `check`, which knows the weights, names what it needs.
        """
        if not (layout.split_half and isinstance(self.up, LowRank)):
            return self
        b = self.up.b
        shape = tuple(getattr(b, "shape", ()))
        if len(shape) != 3 or shape[1] % 2:
            return self
        experts, outputs, rank = shape
        if b.is_contiguous():
            b = interleave_gate_up(b)
        else:  # experts lie beside each other, as peft's do: whole rows of them change places
            rows = interleave_gate_up(b.permute(1, 2, 0).reshape(outputs, -1))
            b = rows.reshape(outputs, rank, experts).permute(2, 0, 1)
        return self._replace(up=self.up._replace(b=b))

    def merged(self, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Native weights with what the pairs add to them. For diagnosis alone."""

        def sum_of(weight: Tensor, pair: LowRank | None) -> Tensor:
            if pair is None:
                return weight
            return (weight + pair.scale * (pair.b.float() @ pair.a.float())).to(weight.dtype)

        with plain_ops():
            return sum_of(w1, self.up), sum_of(w2, self.down)

    def check(self, *weights: tuple[int, int, int]) -> None:
        """Refuse pairs that do not fit native weights `[E, N_out, N_in]` of these shapes; messages
        name the factor.
        """
        for name, pair, (experts, outputs, inputs) in zip(self._fields, self, weights, strict=True):
            if pair is None:
                continue
            need_type(name, pair, LowRank, "a LowRank, or None")
            for factor, tensor in zip(("a", "b"), pair[:2], strict=True):
                require_framework_tensor(tensor, f"{name}.{factor}")
                floating = torch.bfloat16, torch.float16, torch.float32
                need_dtype(f"{name}.{factor}", tensor, *floating)
            rank = int(pair.a.shape[1]) if len(pair.a.shape) == 3 else 0
            fits = tuple(pair.a.shape) == (experts, rank, inputs) and 1 <= rank <= MAX_RANK
            needed = f"[E, r, N_in] = [{experts}, 1 to {MAX_RANK}, {inputs}]"
            need_shape(fits, f"{name}.a", pair.a, needed)
            wanted = (experts, outputs, rank)
            fits = tuple(pair.b.shape) == wanted
            need_shape(fits, f"{name}.b", pair.b, f"[E, N_out, r] = {wanted}")
            is_number = isinstance(pair.scale, Real) and math.isfinite(pair.scale)
            words = f"{name}.scale is {pair.scale!r}; needed: a finite number"
            expect(is_number, ConfigError, words)


NO_ADAPTERS = Adapters()
