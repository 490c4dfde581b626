"""Factors of low-rank adapters as the kernels for Hopper read them: contiguous, in the dtype of the
tokens, with zeros behind the rank, and transposed for the backward.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interop import empty
from .low_rank import LowRank

Tensor = torch.Tensor


class FactorOperands:
    """The operands that one pair of factors is in one pass; each is made when somebody asks for it.

    prepare: `prepare_factor` of the module of the narrow products.
    """

    def __init__(self, pair: LowRank, dtype: torch.dtype, prepare: Any, stream: int) -> None:
        # And the axis of the rank.
        self._factors = {"a": (pair.a.detach(), 1), "b": (pair.b.detach(), 2)}
        self._width, self._dtype = pair.width, dtype
        self._prepare, self._stream = prepare, stream

    def straight(self, name: str) -> Tensor:
        """a `[E, width, N_in]` or b `[E, N_out, width]`."""
        factor, axis = self._factors[name]
        as_it_is = factor.dtype == self._dtype and factor.shape[axis] == self._width
        if as_it_is and factor.is_contiguous() and factor.data_ptr() % 16 == 0:
            return factor
        return self._made(name, flips=False)

    def transposed(self, name: str) -> Tensor:
        """a `[E, N_in, width]` or b `[E, width, N_out]`."""
        return self._made(name, flips=True)

    def _made(self, name: str, *, flips: bool) -> Tensor:
        factor, axis = self._factors[name]
        shape = [int(size) for size in factor.shape]
        shape[axis] = self._width
        experts, *sides = shape
        made: Tensor = empty((experts, *sides[:: -1 if flips else 1]), self._dtype, factor.device)
        self._prepare(factor, *((None, made) if flips else (made, None)), self._stream)
        return made
