"""Tensors of the caller that a backward reads where they lie. docs/design.md, "What a backward reads
of its caller", lists all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .interop import holds_memory
from .weights.changes import versions_of

Tensor = torch.Tensor


class Borrowed:
    """Tensors, and how often each had been written when this was made. The tensors must be the
    caller's own, because under Paddle a detached one counts its own writes only.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Pairs of the caller's name for a tensor, and the tensor; names may repeat."""
        self.named = tuple(named)
        self._writes = self._versions()

    def check(self, between: str = "a forward and its backward") -> None:
        """RuntimeError where one was written or freed between these two."""
        if self._versions() == self._writes and not any(_is_freed(t) for _, t in self.named):
            return
        for (name, tensor), writes in zip(self.named, self._writes, strict=True):
            freed = _is_freed(tensor)
            if freed or versions_of([tensor]) != (writes,):
                raise RuntimeError(
                    f"{name} was {'freed' if freed else 'written in place'} between {between}, which "
                    "reads it; needed: a tensor that stays until then, or a copy for the write"
                )

    def _versions(self) -> tuple[int, ...]:
        return versions_of([tensor for _, tensor in self.named])


def _is_freed(tensor: Tensor) -> bool:
    # A tensor without elements never had memory that it could lose.
    return 0 not in tuple(tensor.shape) and not holds_memory(tensor)
