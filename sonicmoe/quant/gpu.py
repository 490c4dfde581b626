"""FP8 quantisation on the GPU: tokens by rows, expert weights once per optimizer step. No host
sync.

Codes and scales equal those of `reference` bit for bit, and host tensors are served by it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DTypeError, LayoutError, ShapeError, expect
from ..interop import (
    aligned,
    current_stream,
    data_ptr,
    device_name,
    device_of,
    dtype_name,
    empty,
    is_cuda,
    require_framework_tensor,
    require_same_device,
)
from ..kernels.cuda_quantize import quantize_source
from ..refusals import need_dtype, need_shape
from ..routing.backends import arch_of
from ..weight_source import StackedMatrices, WeightSource
from .format import BlockScaledTensor, Orientation
from .recipes import BlockShape, iso, rows
from .reference import quantize, transpose_storage

Tensor = torch.Tensor

ALIGNMENT = 16  # bytes of an address, and elements of an axis that is quantised
ROW_BLOCK = rows(128)
# Of w1 [N1, H] and w2 [H, I]. 256 rows of w1 are 128 of gate and 128 of up.
W1_BLOCK, W2_BLOCK = BlockShape(256, 128), iso(128)
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.lru_cache(maxsize=64)
def _kernels(device: str) -> Any:
    """The compiled module; errors as `CudaSource.load`."""
    return quantize_source(arch_of(device)).load()


def quantize_rows(x: Tensor) -> BlockScaledTensor:
    """`[T, C]` bf16, fp16 or fp32 -> E4M3 with one fp32 scale per row and 128 columns, `[T,
    ceil(C/128)]`; one launch.

    NaN and infinity: as `reference.quantize`. DTypeError or ShapeError where `x` is of another
    dtype, no matrix, or C is no multiple of 16.
    """
    require_framework_tensor(x, "x")
    need_dtype("x", x, *VALUE_DTYPES)
    shape = tuple(int(size) for size in x.shape)
    fits = len(shape) == 2 and shape[1] % ALIGNMENT == 0
    need_shape(fits, "x", x, f"[T, C] with C a multiple of {ALIGNMENT}")
    if not is_cuda(x) or 0 in shape:
        return quantize(x, ROW_BLOCK)
    x, q = aligned(x), BlockScaledTensor.empty(shape, ROW_BLOCK, device_of(x))
    _kernels(device_name(x)).quantize_rows(x, q.bytes, q.scale_inv, current_stream(x))
    return q


class QuantizedWeights:
    """FP8 codes of one layer's expert weights in the orders that forward and dgrad read, kept
    current on the device.

    `update` compares a sample of the weights with checksums and quantises them again only where it
    differs; both happen on the device, so that nothing waits and a CUDA graph of `update` follows
    later weight updates by itself. The sample is 256 bytes of
    one row in every 128, of every matrix: some of it changes in any optimizer step. A change by
    hand of a few values may miss it; `update(force=True)`, or `invalidate` before, always
    quantises. A weight that moved is always quantised.

    Before a capture, call `update` once: a graph does not learn new addresses, and codes that are
    not current would be made at every replay. Buffers are overwritten in place, in stream order: no
    forward may be outstanding whose backward still needs the old codes. A caller from several streams
    orders them, as `PreparedWeights` does.
    """

    def __init__(self, iso_weight: bool = False) -> None:
        """`iso_weight`: keep forward's order only; dgrad's is made whenever it is read."""
        self.iso_weight = iso_weight
        self._layout: tuple[Any, ...] | None = None
        self._pointers: tuple[Sequence[int], ...] = ()
        self._current = self._was_copied = False
        self._forward: tuple[BlockScaledTensor, ...] = ()
        self._dgrad: tuple[BlockScaledTensor, ...] = ()
        # Of both launches, made once for a layout: composing them takes as long as a launch.
        self._check_arguments: tuple[Any, ...] = ()
        self._quantize_arguments: tuple[Any, ...] = ()
        self._kernels: Any = None

    def invalidate(self) -> None:
        """Make the next `update` quantise, whatever the guard finds."""
        self._current = False

    def update(self, source: WeightSource, force: bool = False) -> None:
        """Bring the codes up to date with the user's weights; host tensors are always quantised.
        DTypeError, ShapeError, LayoutError or DeviceError names the weight that the kernels cannot
        read in place.
        """
        if not is_cuda(source.anchor):
            self._update_on_host(source)
            return
        # The host knows addresses and layouts; what the values are is the device's affair.
        pointers = source.places
        layout = _layout_of(source)
        if layout != self._layout or pointers != self._pointers:
            _check_source(source)
            self._current, self._was_copied = False, source.is_copied
        if layout != self._layout:
            self._allocate(source, layout)
        # Not current until every launch below has been accepted: if one fails, the checksums may be
        # newer than the codes, and the guard alone would never notice.
        force, self._current = force or not self._current, False
        table = self._check_arguments[0]
        if pointers != self._pointers:
            given = list(source.pointers), table, current_stream(table)
            self._module(device_name(table)).store_addresses(*given)
            self._pointers = pointers
        self._launch(force)

    def keep(self, w1: Any, force: bool = False) -> bool:
        """`update` for weights that lie where they lay at the last one, without their source; False
        where that one failed, read a copy, or was on a host, or where its w1 is no longer kept.
        """
        # A copy of the parameters was read once, and the parameters may have changed since.
        is_held = self._check_arguments and w1 is self._forward[0]
        if not (self._current and is_held) or self._was_copied:
            return False
        self._current = False
        self._launch(force)
        return True

    def _launch(self, force: bool) -> None:
        """Compare, and quantise where something differs."""
        stream = current_stream(self._check_arguments[0])
        # The first launch leaves its finding in `state` and the second one reads it there, so the
        # host waits for neither.
        self._kernels.check_weights(*self._check_arguments, stream)
        self._quantize(*self._quantize_arguments, force, stream)
        self._current = True

    def _module(self, device: str) -> Any:
        """The kernels that check and quantise."""
        return _kernels(device)

    def _quantize(self, *arguments: Any) -> None:
        self._kernels.quantize_weights(*arguments)

    def _written(self) -> list[Any]:
        """The tensors that the kernel writes, in the order of its arguments; None where it leaves
        one out.
        """
        written: list[Any] = [
            tensor for q in (*self._forward, *self._dgrad) for tensor in (q.bytes, q.scale_inv)
        ]
        return written + [None] * (4 if self.iso_weight else 0)

    def add_dgrad(self) -> None:
        """Keep dgrad's order too, which the next `update` makes, as `iso_weight=False` does. Not where a
        CUDA graph was captured: it writes forward's order alone, and would hide a change from `update`.
        """
        if not self.iso_weight:  # the `update` behind an earlier call failed
            return
        if self._check_arguments:
            experts, n1, hidden = self.w1.shape
            sizes, device = (experts, n1, hidden, self.w2.shape[2]), device_of(self.w1.codes)
            self._dgrad = _unwritten(sizes, (W1_BLOCK, W2_BLOCK), device, Orientation.COLUMNS)
        self.iso_weight = self._current = False
        if self._check_arguments:
            table, form = self._quantize_arguments[0], self._quantize_arguments[-5:]
            self._quantize_arguments = (table, *self._written(), *form)

    @property
    def w1(self) -> BlockScaledTensor:
        """`[E, N1, H]`, gate and up rows interleaved, as forward reads it."""
        return self._forward[0]

    @property
    def w2(self) -> BlockScaledTensor:
        """`[E, H, I]`, as forward reads it."""
        return self._forward[1]

    @property
    def w1_dgrad(self) -> BlockScaledTensor:
        """The matrices of `w1`, stored `[E, H, N1]`. Under `iso_weight` every read launches a
        transposition.
        """
        return transposed(self.w1) if self.iso_weight else self._dgrad[0]

    @property
    def w2_dgrad(self) -> BlockScaledTensor:
        """The matrices of `w2`, stored `[E, I, H]`; `iso_weight` as for `w1_dgrad`."""
        return transposed(self.w2) if self.iso_weight else self._dgrad[1]

    @property
    def nbytes(self) -> int:
        return sum(q.nbytes for q in (*self._forward, *self._dgrad))

    def _allocate(self, source: WeightSource, layout: tuple[Any, ...]) -> None:
        experts, device = len(source.up), device_of(source.anchor)
        n1, hidden, inner = source.n1, source.hidden_size, source.intermediate_size
        if _codes_of(self._layout) != _codes_of(layout):
            self._allocate_codes(experts, n1, hidden, inner, device)
        user, dtype = source.layout, dtype_name(source.anchor.dtype)
        table = empty(((3 if user.apart else 2) * experts,), torch.int64, device)
        sizes = (table, n1, hidden, inner, user.transposed, user.apart, dtype)
        self._kernels = self._module(device_name(table))
        checksums = empty((int(self._kernels.num_checksums(*sizes)),), torch.int32, device)
        state = torch.zeros((2,), dtype=torch.int32, device=source.anchor.device)
        self._check_arguments = (*sizes, checksums, state)
        form = user.transposed, user.split_half, user.apart, dtype
        self._quantize_arguments = (table, *self._written(), *form, state)
        # The new table is empty: `update` fills it where it compares addresses.
        self._layout, self._pointers = layout, ()

    def _allocate_codes(self, experts: int, n1: int, hidden: int, inner: int, device: Any) -> None:
        sizes = experts, n1, hidden, inner
        self._forward = _unwritten(sizes, (W1_BLOCK, W2_BLOCK), device)
        stored = () if self.iso_weight else (W1_BLOCK, W2_BLOCK)
        self._dgrad = _unwritten(sizes, stored, device, Orientation.COLUMNS)

    def _update_on_host(self, source: WeightSource) -> None:
        # A host has no kernel that reads the user's layout.
        w1, w2, *_ = source.native()
        self._forward = quantize(w1, W1_BLOCK), quantize(w2, W2_BLOCK)
        self._dgrad = () if self.iso_weight else tuple(transpose_storage(q) for q in self._forward)
        self._layout = None


def _unwritten(
    sizes: tuple[int, int, int, int],
    blocks: tuple[BlockShape, ...],
    device: Any,
    orientation: Orientation = Orientation.ROWS,
) -> tuple[BlockScaledTensor, ...]:
    """Codes of w1 and w2, of the E, N1, H, I of `sizes`, in these blocks of theirs."""
    experts, n1, hidden, inner = sizes
    matrices = (n1, hidden), (hidden, inner)
    # What dgrad reads are the same matrices, stored the other way round.
    turn = 1 if orientation is Orientation.ROWS else -1
    return tuple(
        BlockScaledTensor.empty((experts, *shape[::turn]), block, device, orientation=orientation)
        for shape, block in zip(matrices, blocks, strict=False)
    )


def transposed(q: BlockScaledTensor) -> BlockScaledTensor:
    """`[E, R, C]` matrices that are stored by rows, in blocks of at most 256 rows and columns, brought
    into the other memory order.
    """
    if not is_cuda(q.codes):
        return transpose_storage(q)
    matrices, n_rows, n_cols = (int(size) for size in q.codes.shape)
    other = Orientation.COLUMNS if q.orientation is Orientation.ROWS else Orientation.ROWS
    shape, device = (matrices, n_cols, n_rows), device_of(q.codes)
    scales, columns = q.scale_inv, -(-n_cols // 128)
    # The kernel knows blocks of 128 columns: those of a wider one have its scale.
    is_wide = int(scales.shape[2]) < columns
    if is_wide:
        scales = scales.repeat_interleave(2, dim=2)[:, :, :columns].contiguous()
    out = empty(shape, torch.uint8, device)
    out_scales = empty((matrices, columns, int(scales.shape[1])), torch.float32, device)
    given = q.bytes, scales, out, out_scales
    _kernels(device_name(q.codes)).transpose_bytes(*given, current_stream(q.codes))
    out_scales = out_scales[:, ::2].contiguous() if is_wide else out_scales
    return BlockScaledTensor.from_bytes(out, out_scales, q.block, q.code, other)


def _layout_of(source: WeightSource) -> tuple[Any, ...]:
    sizes = (len(source.up), source.n1, source.hidden_size, source.intermediate_size)
    layout, first = source.layout, source.anchor
    return (*sizes, layout, first.dtype, device_name(first))


def _codes_of(layout: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """What the codes depend on."""
    # Parameters that change their layout in place keep their codes' memory, which callers and
    # outstanding backwards hold.
    return None if layout is None else (layout[:4], layout[-1])


def _check_source(source: WeightSource) -> None:
    n1, hidden, inner = source.n1, source.hidden_size, source.intermediate_size
    words = f"weights have N1={n1}, H={hidden}, I={inner}; needed: multiples of {ALIGNMENT}"
    whole = all(size > 0 and size % ALIGNMENT == 0 for size in (n1, hidden, inner))
    expect(whole, ShapeError, words)
    words = f"split halves need N1 = 2 I, got N1={n1} and I={inner}"
    expect(not source.layout.split_half or n1 == 2 * inner, ShapeError, words)
    dtype, first = source.up[0].dtype, ("up[0]", source.up[0])
    need_dtype(*first, *VALUE_DTYPES)
    rows = n1 if source.up_half is None else inner
    for kind, matrices, shape in (
        ("up", source.up, (rows, hidden)),
        ("up_half", source.up_half or (), (rows, hidden)),
        ("down", source.down, (hidden, inner)),
    ):
        wanted = shape[::-1] if source.layout.transposed else shape
        # One matrix that the kernels cannot read spoils the layer, so each is looked at. Those of a
        # stacked weight are alike.
        looked = (matrices[0],) if isinstance(matrices, StackedMatrices) else matrices
        for index, matrix in enumerate(looked):
            name = f"{kind}[{index}]"
            need_shape(tuple(matrix.shape) == wanted, name, matrix, wanted)
            words = f"{name} is {dtype_name(matrix.dtype)}, up[0] is {dtype_name(dtype)}"
            expect(matrix.dtype == dtype, DTypeError, words)
            words = f"{name} is not contiguous; needed: a contiguous matrix"
            expect(matrix.is_contiguous(), LayoutError, words)
            words = f"{name} starts at {data_ptr(matrix):#x}"
            needed = f"a multiple of {ALIGNMENT} bytes"
            expect(data_ptr(matrix) % ALIGNMENT == 0, LayoutError, f"{words}; needed: {needed}")
            require_same_device([first, (name, matrix)])
