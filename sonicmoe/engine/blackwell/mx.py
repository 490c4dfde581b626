"""MXFP8 matrices: E4M3 codes in 32x32 blocks, and their scales of one byte in the blocked layout
that tensor cores of compute capability 10.x read.

A scale is the exponent of a power of two (UE8M0). A GEMM reads one for every row and 32 of the
contraction, in atoms of 512 bytes that hold 128 rows x 4 blocks. Of a square block both
contractions want the same byte, 32 times each, so one set of codes has two scale tensors:

    along_columns   of a matrix [M, K] that is contracted over K   [ceil(M/128), ceil(K/128), 512]
    along_rows      of the same matrix, contracted over M          [ceil(K/128), ceil(M/128), 512]

Rows in expert order are ragged. The atoms of expert e begin at `padded_offsets[e] / 128 + e`, so one
atom lies between the experts that nobody reads; R rows take R/128 + E - 1. The layout is that of
cuBLAS and of `tile_atom_to_shape_SF` in CuTe.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import ShapeError, expect
from ...interop import current_stream, device_name, device_of, empty, numel
from ...kernels.blackwell import mx_quantize_source
from ...quant.format import BlockScaledTensor, Code, Orientation
from ...quant.gpu import QuantizedWeights
from ...quant.recipes import RECIPES, BlockShape, iso, rows
from ...refusals import need_dtype, need_shape
from ...routing.backends import arch_of

Tensor = torch.Tensor

RECIPE = RECIPES["iso32-pow2"]
BLOCK, ROW_BLOCK = iso(32), rows(32)
ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512
COLUMN_MULTIPLE = 16
_BLOCK = 32
_MANTISSA_BITS = 23


def to_bytes(scale_inv: Tensor) -> Tensor:
    """uint8 of fp32 powers of two; an infinite scale becomes 255, the NaN of these bytes."""
    return (scale_inv.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def from_bytes(scales: Tensor) -> Tensor:
    """Inverse of `to_bytes`."""
    return (scales.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def to_atoms(scales: Tensor) -> Tensor:
    """`[..., M, B]` bytes, one for each row and block -> `[..., ceil(M/128), ceil(B/4), 512]`; zeros
    where an atom is larger than the matrix.
    """
    *lead, m, blocks = (int(size) for size in scales.shape)
    down, across = -(-m // ATOM_ROWS), -(-blocks // ATOM_BLOCKS)
    whole = torch.zeros(
        [*lead, down * ATOM_ROWS, across * ATOM_BLOCKS], dtype=torch.uint8, device=scales.device
    )
    whole[..., :m, :blocks] = scales
    # [rows / 128, rows / 32 % 4, rows % 32, blocks / 4, blocks % 4], and in that the bytes of an
    # atom lie as [rows % 32, rows / 32 % 4, blocks % 4].
    n = len(lead)
    split = whole.reshape([*lead, down, 4, 32, across, ATOM_BLOCKS])
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return split.permute(*order).reshape([*lead, down, across, ATOM_BYTES]).contiguous()


def from_atoms(atoms: Tensor) -> Tensor:
    """Inverse of `to_atoms` but for the padding: `[..., A, B, 512]` -> `[..., 128 A, 4 B]`."""
    *lead, down, across, _ = (int(size) for size in atoms.shape)
    n = len(lead)
    split = atoms.reshape([*lead, down, across, 32, 4, ATOM_BLOCKS])
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return split.permute(*order).reshape([*lead, down * ATOM_ROWS, across * ATOM_BLOCKS])


def ragged_atoms(num_rows: int, num_experts: int) -> int:
    """Atoms that R rows of E experts take along the rows."""
    return num_rows // ATOM_ROWS + num_experts - 1


def atom_of_tile(padded_offsets: Tensor, num_rows: int) -> Tensor:
    """int64 `[R/128]`: the atom of every 128 rows. Of rows behind the last expert's, which have
    none, the last atom. Waits for nothing.
    """
    tiles = num_rows // ATOM_ROWS
    experts = int(padded_offsets.shape[0]) - 1
    first = torch.arange(tiles, dtype=torch.int64, device=padded_offsets.device)
    # Experts that end at or before a tile's first row come before its own, those without rows too.
    ends = padded_offsets[1:].unsqueeze(0) <= (first * ATOM_ROWS).unsqueeze(1)
    expert = ends.to(torch.int64).sum(1)
    return torch.clamp(first + expert, max=ragged_atoms(num_rows, experts) - 1)


class MxTensor(BlockScaledTensor):
    """Codes `[..., M, K]` by rows, with scales as a GEMM reads them. `scale_inv`, for the host and
    for diagnosis, is read off them when it is asked for.

    along_columns, along_rows: see the module docstring; None where no GEMM contracts so.
    padded_offsets: of ragged rows.
    """

    along_columns: Tensor | None
    along_rows: Tensor | None
    padded_offsets: Tensor | None

    @classmethod
    def of(
        cls,
        held: Tensor,
        along_columns: Tensor | None,
        along_rows: Tensor | None,
        block: BlockShape = BLOCK,
        padded_offsets: Tensor | None = None,
    ) -> MxTensor:
        """A tensor over bytes and scales that this package has made itself; unchecked."""
        made = cls.__new__(cls)
        made.__dict__.update(
            bytes=held, along_columns=along_columns, along_rows=along_rows,
            padded_offsets=padded_offsets, block=block, code=Code.E4M3,
            orientation=Orientation.ROWS,
        )  # fmt: skip
        return made

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes as bytes, and the scales that it has."""
        along = self.along_columns, self.along_rows
        return (self.bytes, *(scales for scales in along if scales is not None))

    @property
    def serves_both(self) -> bool:
        """Whether it has scales along both axes, as square blocks do."""
        return self.along_columns is not None and self.along_rows is not None

    @property
    def nbytes(self) -> int:
        return sum(numel(part) for part in self.parts)

    def overwrite(self, other: BlockScaledTensor) -> None:
        """Write over codes and scales; scales of another kind are brought into this layout."""
        self.bytes.copy_(other.bytes)
        if isinstance(other, MxTensor):
            for own, theirs in zip(self.parts[1:], other.parts[1:], strict=True):
                own.copy_(theirs)
            return
        by_columns, by_rows = scale_atoms(other)
        where: Any = self._atoms()
        if self.along_columns is not None:
            self.along_columns[where] = by_columns
        if self.along_rows is not None:
            # [E, B, A, 512] of weights, and [B, A, 512] of ragged rows.
            self.along_rows[(..., where, slice(None))] = by_rows

    def __getattr__(self, name: str) -> Any:
        """`scale_inv` too, as fp32 in the blocks of the codes."""
        if name != "scale_inv":
            return super().__getattr__(name)
        return self._read_scales()  # not kept: weights are overwritten in place

    def _read_scales(self) -> Tensor:
        m, k = (int(size) for size in self.bytes.shape[-2:])
        across = -(-k // _BLOCK)
        if self.along_columns is not None:
            # Every row of a block repeats its scale, so the first row of each is enough.
            scales = self._of_tiles(self.along_columns, 0)
            return from_bytes(from_atoms(scales)[..., : m : self.block.rows, :across]).contiguous()
        assert self.along_rows is not None and self.block == BLOCK
        scales = from_atoms(self._of_tiles(self.along_rows, 1))
        held = scales[..., :k:_BLOCK, : -(-m // _BLOCK)].transpose(-2, -1)
        return from_bytes(held.contiguous())

    def _of_tiles(self, scales: Tensor, axis: int) -> Tensor:
        return scales if self.padded_offsets is None else scales.index_select(axis, self._atoms())

    def _atoms(self) -> Any:
        """The atoms of the rows: all of them where rows are not ragged."""
        if self.padded_offsets is None:
            return slice(None)
        return atom_of_tile(self.padded_offsets, int(self.bytes.shape[0]))

    def __getitem__(self, index: int) -> BlockScaledTensor:
        """One expert's weight, whose scales are read for it alone."""
        expect(len(self.shape) == 3, ShapeError, "only a batch of matrices can be indexed")
        along = self.along_columns, self.along_rows
        by_columns, by_rows = (None if scales is None else scales[index] for scales in along)
        return MxTensor.of(self.bytes[index], by_columns, by_rows, self.block)


def quantize_rows_iso32(
    source: Tensor,
    row_token: Tensor,
    padded_offsets: Tensor,
    *,
    gathers: bool,
    along_columns: bool = True,
    along_rows: bool = True,
) -> MxTensor:
    """Rows in expert order to `[R, C]` codes in 32x32 blocks, with the scales that are asked for;
    one launch. Rows without a token are zeros. Rows behind the last expert's are not written.

    Args:
        source: bf16 `[T, C]`, gathered here through row_token int32 `[R]`, or `[R, C]` in expert
            order where not `gathers`; C a multiple of 16, R of 128.
        padded_offsets: int64 `[E + 1]`, multiples of 128.

    NaN and infinity: as `reference.quantize` with power-of-two scales.
    """
    need_dtype("source", source, torch.bfloat16)
    num_rows, experts = int(row_token.shape[0]), int(padded_offsets.shape[0]) - 1
    shape = tuple(int(size) for size in source.shape)
    fits = len(shape) == 2 and shape[1] % COLUMN_MULTIPLE == 0 and (gathers or shape[0] == num_rows)
    wanted = f"[{'T' if gathers else num_rows}, C] with C a multiple of {COLUMN_MULTIPLE}"
    need_shape(fits, "source", source, wanted)
    words = f"there are {num_rows} rows; needed: a multiple of {ATOM_ROWS}"
    expect(num_rows % ATOM_ROWS == 0, ShapeError, words)
    width = shape[1]
    down, across = ragged_atoms(num_rows, experts), -(-width // ATOM_ROWS)
    device = device_of(source)

    def scales(wanted: bool, *atoms: int) -> Tensor | None:
        return empty((*atoms, ATOM_BYTES), torch.uint8, device) if wanted else None

    # Bytes, because the kernels know no FP8 dtype of a framework.
    codes = empty((num_rows, width), torch.uint8, device)
    by_columns, by_rows = scales(along_columns, down, across), scales(along_rows, across, down)
    native, stream = _kernels(device_name(source)), current_stream(source)
    native.quantize_rows_iso32(
        source, row_token, padded_offsets, codes, by_columns, by_rows, gathers, stream
    )
    return MxTensor.of(codes, by_columns, by_rows, padded_offsets=padded_offsets)


def scale_atoms(q: BlockScaledTensor) -> tuple[Tensor, Tensor]:
    """Both scale tensors of matrices `[..., M, K]` in 32x32 blocks and power-of-two scales. In
    1x32 blocks the first of them is right.
    """
    m, k = q.shape[-2:]
    held = to_bytes(q.scale_inv)
    along_columns = held.repeat_interleave(q.block.rows, -2)[..., :m, :]
    along_rows = held.transpose(-2, -1).repeat_interleave(_BLOCK, -2)[..., :k, :]
    return to_atoms(along_columns), to_atoms(along_rows)


class MxWeights(QuantizedWeights):
    """One layer's expert weights as MXFP8, kept current as `QuantizedWeights` says. One set of codes
    serves both directions, so `iso_weight` changes nothing here.
    """

    def __init__(self) -> None:
        # One order of codes, which is what `iso_weight` means to the base.
        super().__init__(iso_weight=True)

    @property
    def w1_dgrad(self) -> BlockScaledTensor:
        """`w1` itself, whose `along_rows` dgrad reads."""
        return self.w1

    @property
    def w2_dgrad(self) -> BlockScaledTensor:
        """`w2` itself, whose `along_rows` dgrad reads."""
        return self.w2

    def _module(self, device: str) -> Any:
        return _kernels(device)

    def _quantize(self, *arguments: Any) -> None:
        self._kernels.quantize_weights_iso32(*arguments)

    def _written(self) -> list[Any]:
        return [tensor for q in self._forward for tensor in q.parts]

    def _allocate_codes(self, experts: int, n1: int, hidden: int, inner: int, device: Any) -> None:
        self._forward = tuple(
            _empty_weight((experts, rows, columns), device)
            for rows, columns in ((n1, hidden), (hidden, inner))
        )


def _empty_weight(shape: tuple[int, int, int], device: Any) -> MxTensor:
    experts, down, across = shape[0], -(-shape[1] // ATOM_ROWS), -(-shape[2] // ATOM_ROWS)
    grids = (experts, down, across), (experts, across, down)
    scales = (empty((*grid, ATOM_BYTES), torch.uint8, device) for grid in grids)
    return MxTensor.of(empty(shape, torch.uint8, device), *scales)


@functools.lru_cache(maxsize=64)
def _kernels(device: str) -> Any:
    """The compiled module; errors as `CudaSource.load`."""
    return mx_quantize_source(arch_of(device)).load()
