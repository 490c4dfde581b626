"""Low-rank adapters on the projections of frozen experts: `y = x W + b + scale (x A) B` per expert.

The scale is multiplied into the narrow product, so that each pass adds a plain product to its rows:

    forward    u = scale * (x a^T)     y  += u b^T
    backward   v = scale * (dy b)      dx += v a       da = v^T x      db = dy^T u

u and v `[R, r]` are rounded to the dtype of the tokens, as operands of GEMMs are, and a and b are
read in it. No product has the size of a weight.

Legend: r rank of a pair; other letters as in `interface`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch

from ..errors import ConfigError, expect
from ..interop import plain_ops, require_framework_tensor
from ..layouts import WeightLayout
from ..refusals import need_dtype, need_shape, need_type
from ..routing.metadata import round_up

Tensor = torch.Tensor
MAX_RANK = 128
_COLUMNS = 8  # of bf16 are the 16 bytes that GEMMs read at a time; narrower factors get zeros
NAMES_OF_FACTORS = "up.a", "up.b", "down.a", "down.b"


class LowRank(NamedTuple):
    """The pair of one projection: `a [E, r, N_in]`, `b [E, N_out, r]` in bf16, fp16 or fp32, and what
    their product is multiplied by. Any strides will do, so views of other arrangements are.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])

    @property
    def width(self) -> int:
        """Columns of u and v: the rank, rounded up."""
        return round_up(self.rank, _COLUMNS)

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Contiguous `(a [E, width, N_in], b [E, N_out, width])` as GEMMs read them."""
        experts, rank, inputs = (int(size) for size in self.a.shape)
        a, b = (factor.detach().to(dtype) for factor in (self.a, self.b))
        if self.width != rank:
            more = (experts, self.width - rank)
            a = torch.cat([a, torch.zeros((*more, inputs), dtype=dtype, device=a.device)], 1)
            wide = (experts, int(b.shape[1]), more[1])
            b = torch.cat([b, torch.zeros(wide, dtype=dtype, device=a.device)], 2)
        return a.contiguous(), b.contiguous()

    def delta(self) -> Tensor:
        """fp32 `[E, N_out, N_in]`, what the pair adds to a native weight. For diagnosis alone."""
        return self.scale * (self.b.detach().float() @ self.a.detach().float())


class Adapters(NamedTuple):
    """Those of a layer. `up.b` has the order of the rows of w1 as the caller's weights have it, and the
    native one (gate and up in turns) where an engine reads it.
    """

    up: LowRank | None = None
    down: LowRank | None = None

    @property
    def pairs(self) -> tuple[LowRank | None, LowRank | None]:
        return self.up, self.down

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """`(up.a, up.b, down.a, down.b)`."""
        return tuple([f for p in self for f in ((None, None) if p is None else (p.a, p.b))])

    @property
    def scales(self) -> tuple[float, float]:
        up, down = (0.0 if pair is None else float(pair.scale) for pair in self.pairs)
        return up, down

    @classmethod
    def of(cls, factors: Sequence[Tensor | None], scales: Sequence[float]) -> Adapters | None:
        """The inverse of `factors` and `scales`; None where there is no factor."""
        a1, b1, a2, b2 = factors
        up = None if a1 is None or b1 is None else LowRank(a1, b1, scales[0])
        down = None if a2 is None or b2 is None else LowRank(a2, b2, scales[1])
        return None if up is None and down is None else cls(up, down)

    def native(self, layout: WeightLayout) -> Adapters:
        """With `up.b` in native order, by operations that autograd sees."""
        if self.up is None or not layout.split_half:
            return self
        # Rows of b are rows of an untransposed w1, whatever way the weights lie.
        rows = WeightLayout(split_half=True).native_w1(self.up.b)
        return self._replace(up=self.up._replace(b=rows))

    @property
    def columns(self) -> tuple[slice, slice]:
        """Where u of either projection lies in the rows that a forward saves."""
        first, second = (0 if pair is None else pair.width for pair in self.pairs)
        return slice(0, first), slice(first, first + second)

    def merged(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Native weights with what the pairs add to them, in new tensors. For diagnosis alone."""
        with plain_ops():
            w1, w2 = (
                weight if pair is None else (weight.float() + pair.delta()).to(weight.dtype)
                for weight, pair in zip((w1, w2), self.pairs, strict=True)
            )
        return w1, w2, b1, b2

    def check(self, w1: tuple[int, int, int], w2: tuple[int, int, int]) -> None:
        """Refuse pairs that do not fit native weights of these shapes; the message names the factor."""
        for name, pair, weight in (("up", self.up, w1), ("down", self.down, w2)):
            if pair is not None:
                _check(pair, name, weight)


def checked(adapters: object) -> Adapters | None:
    """Adapters as a face is given them: one of `Adapters` or a pair `(up, down)`, each `LowRank` or
    None. None where there are none.

    Raises:
        TypeError: it is neither.
    """
    if adapters is None:
        return None
    kinds = LowRank, type(None)
    if not (isinstance(adapters, tuple) and len(adapters) == 2):
        raise TypeError(f"adapters is {type(adapters).__name__}; needed: (up, down), or None")
    for name, pair in zip(("up", "down"), adapters, strict=True):
        need_type(f"{name} of adapters", pair, kinds, "a LowRank or None")
    return None if adapters == (None, None) else Adapters(*adapters)


def _check(pair: LowRank, name: str, weight: tuple[int, int, int]) -> None:
    """Of a native weight `[E, N_out, N_in]`."""
    experts, outputs, inputs = weight
    for factor, tensor in (("a", pair.a), ("b", pair.b)):
        require_framework_tensor(tensor, f"{name}.{factor}")
        need_dtype(f"{name}.{factor}", tensor, torch.bfloat16, torch.float16, torch.float32)
    rank = int(pair.a.shape[1]) if len(pair.a.shape) == 3 else 0
    fits = tuple(pair.a.shape) == (experts, rank, inputs) and 1 <= rank <= MAX_RANK
    needed = f"[E, r, N_in] = [{experts}, 1 to {MAX_RANK}, {inputs}]"
    need_shape(fits, f"{name}.a", pair.a, needed)
    wanted = (experts, outputs, rank)
    need_shape(tuple(pair.b.shape) == wanted, f"{name}.b", pair.b, f"[E, N_out, r] = {wanted}")
    is_number = isinstance(pair.scale, Real) and math.isfinite(pair.scale)
    words = f"{name}.scale is {pair.scale!r}; needed: a finite number"
    expect(is_number, ConfigError, words)
