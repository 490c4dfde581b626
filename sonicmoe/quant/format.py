"""`BlockScaledTensor`: 8-bit codes and their scales as one type that no operator mistakes for a
plain tensor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..errors import DTypeError, ShapeError, expect
from ..interop import dtype_name, empty
from .recipes import BlockShape

Tensor = torch.Tensor

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
INT8_MAX = 127.0


class Code(Enum):
    """Element format: `E4M3` (OCP FP8, finite range +-448, NaN = 0x7F/0xFF), symmetric `INT8`
    (+-127), or `ADAPTIVE`: each block has one of the two, E4M3 where its scale is negative, and the
    scale's magnitude multiplies the codes.
    """

    E4M3 = "e4m3"
    INT8 = "int8"
    ADAPTIVE = "adaptive"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Code.E4M3 else torch.int8

    @property
    def max(self) -> float:
        """Largest finite magnitude of a code; of ADAPTIVE where a block has INT8 codes."""
        return E4M3_MAX if self is Code.E4M3 else INT8_MAX


class Orientation(Enum):
    """How the codes of a logical `[R, C]` matrix lie in memory: `ROWS` as `[R, C]`, `COLUMNS` as
    its transpose `[C, R]`.
    """

    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """A logical `[..., R, C]` matrix as 8-bit codes with one fp32 scale per block: `value = code *
    scale_inv`.

    Attributes:
        codes: `[..., R, C]` (`Orientation.ROWS`) or `[..., C, R]` (`Orientation.COLUMNS`),
            contiguous, e4m3 or int8 (ADAPTIVE: the bytes as int8).
        scale_inv: fp32 dequantisation multipliers, `[..., ceil(R/block.rows), ceil(C/block.cols)]`,
            transposed with the codes.
        block: block shape on the logical matrix.
        code: element format.
        orientation: memory order of codes and scales.

    NaN: an E4M3 code NaN dequantises to NaN. INT8 has no NaN code; a non-finite element makes its
    block's scale NaN. An ADAPTIVE block with a non-finite element is one of INT8.
    The type is no tensor: arithmetic on it raises TypeError, so FP8 bytes can never be read as
    bf16. DTypeError or ShapeError where codes, scales and block do not belong together.
    """

    codes: Tensor
    scale_inv: Tensor
    block: BlockShape
    code: Code
    orientation: Orientation = Orientation.ROWS

    def __post_init__(self) -> None:
        """Check dtypes and the scale grid.

        A dozen of these are made in every step, so a message is composed only where it is raised;
        `expect` would compose it every time.
        """
        if self.codes.dtype != self.code.dtype:
            name, needed = dtype_name(self.codes.dtype), dtype_name(self.code.dtype)
            raise DTypeError(f"codes are {name}, the {self.code.value} code needs {needed}")
        if self.scale_inv.dtype != torch.float32:
            raise DTypeError(f"scale_inv is {dtype_name(self.scale_inv.dtype)}, needed: float32")
        wanted = scale_shape(tuple(self.codes.shape), self._stored_block())
        if tuple(self.scale_inv.shape) != wanted:
            raise ShapeError(
                f"scale_inv has shape {tuple(self.scale_inv.shape)}; codes "
                f"{tuple(self.codes.shape)} in {self._stored_block()} blocks need {wanted}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """By the bytes, because PyTorch unpickles no tensor of 8-bit floats."""
        held = {"bytes": self.bytes, **self.__dict__}
        held.pop("codes", None)
        return object.__new__, (type(self),), held

    def _stored_block(self) -> BlockShape:
        return self.block if self.orientation is Orientation.ROWS else self.block.transposed

    def __getattr__(self, name: str) -> Any:
        """The codes of a tensor that was made of bytes, viewed in their dtype when first asked for:
        kernels take the bytes, and a view costs as much host time as an allocation.
        """
        held = self.__dict__.get("bytes")
        if name != "codes" or held is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        codes = self.__dict__["codes"] = held.view(self.code.dtype)
        return codes

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self._stored_shape()
        if self.orientation is Orientation.ROWS:
            return stored
        return (*stored[:-2], stored[-1], stored[-2])

    def _stored_shape(self) -> tuple[int, ...]:
        held = self.__dict__.get("bytes")  # of the same shape, and often there without the codes
        return tuple(int(size) for size in (self.codes if held is None else held).shape)

    @classmethod
    def of_checked(
        cls, codes: Tensor, scale_inv: Tensor, block: BlockShape, code: Code
    ) -> BlockScaledTensor:
        """A tensor of codes and scales by rows, which somebody has checked against each other."""
        made = cls.__new__(cls)
        made.__dict__.update(
            codes=codes,
            scale_inv=scale_inv,
            block=block,
            code=code,
            orientation=Orientation.ROWS,
        )
        return made

    @classmethod
    def from_bytes(
        cls,
        held: Tensor,
        scale_inv: Tensor,
        block: BlockShape,
        code: Code,
        orientation: Orientation = Orientation.ROWS,
    ) -> BlockScaledTensor:
        """Codes that are held as uint8. Unchecked, for tensors that this package has made itself:
        several are made in every step.
        """
        made = cls.__new__(cls)
        made.__dict__.update(
            bytes=held, scale_inv=scale_inv, block=block, code=code, orientation=orientation
        )
        return made

    @classmethod
    def empty(
        cls,
        stored_shape: tuple[int, ...],
        block: BlockShape,
        device: Any,
        code: Code = Code.E4M3,
        orientation: Orientation = Orientation.ROWS,
    ) -> BlockScaledTensor:
        """Unwritten codes of a stored shape, with their scales. `block` is of the logical matrix,
        and `device` a device as `device_of` returns it.
        """
        stored_block = block if orientation is Orientation.ROWS else block.transposed
        # Allocated as bytes, which kernels take; the FP8 tensor is a view of them.
        held = empty(stored_shape, torch.uint8, device)
        scale_inv = empty(scale_shape(stored_shape, stored_block), torch.float32, device)
        return cls.from_bytes(held, scale_inv, block, code, orientation)

    @functools.cached_property
    def bytes(self) -> Tensor:
        """The codes as uint8, for kernels whose border knows no FP8 dtype; a view."""
        return self.codes.view(torch.uint8)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Every tensor that holds it."""
        return self.codes, self.scale_inv

    @property
    def serves_both(self) -> bool:
        """Whether GEMMs of both contractions read these codes as they lie."""
        return False

    def overwrite(self, other: BlockScaledTensor) -> None:
        """Write the codes and scales of a tensor of equal shape and blocks over these."""
        self.bytes.copy_(other.bytes)
        self.scale_inv.copy_(other.scale_inv)

    @property
    def nbytes(self) -> int:
        # Codes have one byte each, in either format.
        count = math.prod(self._stored_shape())
        return count + 4 * math.prod(int(size) for size in self.scale_inv.shape)

    def __getitem__(self, index: int) -> BlockScaledTensor:
        """One matrix of a batch: `[E, R, C][e]` -> `[R, C]` (a view)."""
        words = "only a batch of matrices can be indexed; slicing rows could cut a block"
        expect(len(self.codes.shape) > 2, ShapeError, words)
        return BlockScaledTensor(
            self.codes[index], self.scale_inv[index], self.block, self.code, self.orientation
        )


def scale_shape(shape: tuple[int, ...], block: BlockShape) -> tuple[int, ...]:
    """Shape of the scales of a stored `[..., R, C]` matrix: partial blocks at the right and bottom
    edge count.
    """
    if len(shape) < 2:
        raise ShapeError(f"a block-scaled tensor has at least two axes, got shape {shape}")
    *lead, n_rows, n_cols = map(int, shape)
    # `-(-a // b)` is the quotient rounded up.
    return (*lead, -(-n_rows // block.rows), -(-n_cols // block.cols))
