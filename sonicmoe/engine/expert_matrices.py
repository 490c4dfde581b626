"""A weight of which each expert has a matrix of its own, as an engine holds it that reads the matrices
where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..interop import data_ptr
from ..layouts import GateUp, stack
from ..quant.format import BlockScaledTensor

Tensor = torch.Tensor
MOST = 240  # experts whose maps a kernel takes; `bf16_grouped_gemm.cuh` says the same


def may_stay_apart(count: int, dtype: Any) -> bool:
    """Whether engine `bf16` on Hopper reads so many experts' weights of this dtype apart. It computes
    fp32 ones in bfloat16, and copies them anyway.
    """
    return count <= MOST and dtype != torch.float32


class ExpertMatrices:
    """Stands for a tensor `[E, rows, columns]`.

    tensors: one contiguous matrix `[rows, columns]` an expert, all of one dtype on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        rows, columns = map(int, self.tensors[0].shape)
        return len(self.tensors), rows, columns

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        return tuple(map(data_ptr, self.tensors))

    def __getitem__(self, expert: int) -> Tensor:
        return self.tensors[expert]

    def stacked(self) -> Tensor:
        """A copy in one tensor."""
        return stack(list(self.tensors))


def tensors_of(weight: Any) -> tuple[Tensor, ...]:
    """Where an engine's weight lies: the bytes of a block-scaled one, a tensor, gate and up, or the
    matrices of each expert.
    """
    if isinstance(weight, ExpertMatrices):
        return weight.tensors
    if type(weight) is GateUp:
        return tuple(weight)
    return (weight.bytes if isinstance(weight, BlockScaledTensor) else weight,)
