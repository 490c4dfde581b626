"""Compile the grouped GEMMs of quack-kernels for fake tensors of symbolic size: imported by build
processes only.

The class of quack-kernels follows the family of the architecture; all else, the epilogues included,
is one text for every family. Each builder returns a compiled function with a flat argument list, so
that a launch converts a handful of tensors and loading it needs neither quack nor CuTe DSL. R rows
in expert order; `cu_rows` int32 `[E+1]` cuts them into experts.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from quack.compile_utils import make_fake_tensor
from quack.epilogue.frontend import EpiMod
from quack.gemm_default_epi import GemmDefaultSm100, GemmDefaultSm120
from quack.layout_utils import select
from quack.rounding import RoundingMode
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

from .quack_epilogues import dgated_epilogue, up_epilogue

_DTYPES = {"bfloat16": BFloat16, "float16": Float16}
# The family's number in `EpiMod._mint`, and its class for products without an epilogue of ours.
_CLASSES = {
    "sm100": (10, GemmDefaultSm100),
    "sm120": (12, GemmDefaultSm120),
}


@dataclass(frozen=True)
class Tiling:
    """The family, and the fields of `quack_tilings.GemmConfig`."""

    family: str
    tile: Any
    cluster: Any
    pingpong: bool
    swizzle: int
    clc: bool

    def gemm(self, cls, dtype, *, gather: bool, **more):
        """An object of a GEMM class of the family."""
        # The class for sm100 takes no pingpong.
        own = {
            "sm100": {"use_clc_persistence": self.clc, "use_tma_gather": False},
            "sm120": {"pingpong": self.pingpong, "use_clc_persistence": self.clc},
        }[self.family]
        return cls(
            Float32,
            _DTYPES[dtype],
            tuple(self.tile),
            (*self.cluster, 1),
            gather_A=gather,
            use_pdl=False,
            **own,
            **more,
        )

    def plain(self, dtype, **options):
        """A GEMM that stores its sums, or adds them, and its argument tuple type."""
        _, cls = _CLASSES[self.family]
        return self.gemm(cls, dtype, **options), cls.EpilogueArguments

    def fused(self, mod: EpiMod, kinds, dtype, *, paired=False, packed=False):
        """The gathered GEMM that runs `mod`, and its argument tuple type."""
        # The public door to this class, EpiMod.gemm, wants real tensors and a device.
        number, _ = _CLASSES[self.family]
        cls = mod._mint(kinds, number, paired, packed, (), RoundingMode.RN, (), False)
        gemm = self.gemm(cls, dtype, gather=True)
        # Tensors come as 16-bit values; quack recasts them to 32-bit pairs along N while tracing and
        # needs to be told the type inside.
        if packed:
            gemm.cd_packed, gemm.implicit_dtype = "n", _DTYPES[dtype]
        return gemm, cls.EpilogueArguments

    # Both values arrive at run time, so one artefact serves devices with different numbers of
    # multiprocessors.
    def schedule(self, max_clusters) -> TileSchedulerOptions:
        """The schedule of a launch. Under cluster launch control the number of clusters is not read."""
        return TileSchedulerOptions(
            max_active_clusters=max_clusters, max_swizzle_size=Int32(self.swizzle)
        )


# `paired` in these builders means that the accumulator has (gate, up) in pairs of columns, `packed`
# that C and D do.
def compile_up(
    *,
    activation: str,
    parameters: str = "",
    gated: bool,
    bias: bool,
    store_z: bool,
    dtype: str,
    **tiling,
) -> Any:
    """`f(x [T, H], w1 [E, N1, H], z [R, N1] | None, y1 [R, I], bias [E, N1] | None, cu_rows,
    gather_index [R], max_clusters)`.
    """
    mod = up_epilogue(activation, parameters, gated=gated, bias=bias, store_z=store_z)
    kinds = (("bias", "row"),) if bias else ()
    tiles = Tiling(**tiling)
    gemm, arguments = tiles.fused(mod, kinds, dtype, paired=gated)

    @cute.jit
    def launch(x: cute.Tensor, w1: cute.Tensor, z, y1: cute.Tensor, bias_en, cu_rows: cute.Tensor,
               gather_index: cute.Tensor, max_clusters: Int32, stream):  # fmt: skip
        # z is D, the main result; without it the compiled kernel stores y1 alone. The argument C
        # has no use here. `const_expr` decides while tracing, so the branch does not exist at run
        # time.
        gemm(x, w1, z, None, arguments(y1=y1, bias=bias_en) if cutlass.const_expr(bias_en is not None) else arguments(y1=y1),
             tiles.schedule(max_clusters), VarlenArguments(mCuSeqlensM=cu_rows, mAIdx=gather_index), stream)  # fmt: skip

    sixteen, (experts, rows, n1, hidden) = _DTYPES[dtype], _sizes(4)
    # A symbol of its own: the compiled code takes the caller's word that y1 has half the columns of
    # z.
    half = _sizes(1)[0] if gated else n1
    return _compile(
        launch,
        # T and R are different symbols: tokens are gathered into rows.
        _matrix(sixteen, _sizes(1)[0], hidden),
        _matrix(sixteen, experts, n1, hidden),
        _matrix(sixteen, rows, n1) if store_z else None,
        _matrix(sixteen, rows, half),
        _matrix(Float32, experts, n1) if bias else None,
        _vector(Int32),
        _vector(Int32, rows),
    )


def compile_down(
    *,
    bias: bool,
    transpose: bool,
    gather: bool,
    dtype: str,
    **tiling,
) -> Any:
    """`f(a [R, K], w, d [R, N], bias [E, N] | None, cu_rows, gather_index | None, max_clusters)`.

    w: `[E, N, K]`, or `[E, K, N]` when `transpose`. a: `[T, K]`, read through `gather_index [R]`
    when `gather`.
    """
    tiles = Tiling(**tiling)
    gemm, arguments = tiles.plain(dtype, gather=gather)
    # w stays as it lies in memory. quack swaps the two axes while tracing, so no copy and no host
    # view is made.
    gemm.b_transposed = transpose

    @cute.jit
    def launch(a: cute.Tensor, w: cute.Tensor, d: cute.Tensor, bias_en, cu_rows: cute.Tensor, gather_index,
               max_clusters: Int32, stream):  # fmt: skip
        epilogue = arguments(mRowVecBroadcast=bias_en)
        gemm(a, w, d, None, epilogue, tiles.schedule(max_clusters),
             VarlenArguments(mCuSeqlensM=cu_rows, mAIdx=gather_index), stream)  # fmt: skip

    sixteen, (experts, rows, n, k) = _DTYPES[dtype], _sizes(4)
    return _compile(
        launch,
        _matrix(sixteen, _sizes(1)[0] if gather else rows, k),
        _matrix(sixteen, experts, k, n) if transpose else _matrix(sixteen, experts, n, k),
        _matrix(sixteen, rows, n),
        _matrix(Float32, experts, n) if bias else None,
        _vector(Int32),
        _vector(Int32, rows) if gather else None,
    )


def compile_dgated(
    *,
    activation: str,
    parameters: str = "",
    gated: bool,
    dtype: str,
    **tiling,
) -> Any:
    """`f(dout [T, H], w2 [E, H, I], dz [R, N1], z [R, N1], y1s [R, I], prob [R], dprob [R, tiles],
    cu_rows, gather_index, max_clusters)`.

    dprob holds one partial sum for each of the `ceil(I / tile_n)` column tiles.
    """
    mod = dgated_epilogue(activation, parameters, gated=gated)
    kinds = (("c", "c"), ("prob", "col"))
    tiles = Tiling(**tiling)
    gemm, arguments = tiles.fused(mod, kinds, dtype, packed=gated)
    gemm.b_transposed = True

    @cute.jit
    def launch(dout: cute.Tensor, w2: cute.Tensor, dz: cute.Tensor, z: cute.Tensor, y1s: cute.Tensor, prob: cute.Tensor,
               dprob: cute.Tensor, cu_rows: cute.Tensor, gather_index: cute.Tensor, max_clusters: Int32, stream):  # fmt: skip
        gemm(dout, w2, dz, z, arguments(prob=prob, y1s=y1s, dprob=dprob), tiles.schedule(max_clusters),
             VarlenArguments(mCuSeqlensM=cu_rows, mAIdx=gather_index), stream)  # fmt: skip

    sixteen, (experts, rows, intermediate, hidden) = _DTYPES[dtype], _sizes(4)
    # As in `compile_up`: N1 = 2 I is a symbol of its own.
    n1 = _sizes(1)[0] if gated else intermediate
    return _compile(
        launch,
        _matrix(sixteen, _sizes(1)[0], hidden),
        _matrix(sixteen, experts, hidden, intermediate),
        _matrix(sixteen, rows, n1),
        _matrix(sixteen, rows, n1),
        _matrix(sixteen, rows, intermediate),
        _vector(Float32, rows),
        # Rows of partial sums may have any length, so nothing is promised about the alignment of a
        # row.
        make_fake_tensor(Float32, (rows, _sizes(1)[0]), leading_dim=1, divisibility=1),
        _vector(Int32),
        _vector(Int32, rows),
    )


def compile_wgrad(*, stored: str, dtype: str, **tiling) -> Any:
    """`f(tokens [T, M], rows [R, N], dw fp32, cu_rows, gather_index [R], max_clusters)`: `dw[e] +=
    tokens[gather_index]^T rows`.

    dw, whose last axis is contiguous, holds `[E, M, N]` where `stored` is "inner", and the
    transposed product `[E, N, M]` where it is "hidden". Where it is "halves", that product's even
    rows come first, and its odd rows behind them. Every element is added to by one thread block, so
    equal calls give equal bits; an expert without rows has +0 added.
    """
    transpose = stored != "inner"
    tiles = Tiling(**tiling)
    gemm, arguments = tiles.plain(
        dtype,
        gather=True,
        # quack then cuts the axis of dw that is not contiguous into (2, N / 2), each with a stride
        # of its own. So the copy engine sorts even and odd rows apart, and also ends a tile that
        # ends past N / 2 rows there.
        concat_layout=("out",) if stored == "halves" else None,
    )

    @cute.jit
    def launch(tokens: cute.Tensor, rows: cute.Tensor, dw: cute.Tensor, cu_rows: cute.Tensor, gather_index: cute.Tensor,
               max_clusters: Int32, stream):  # fmt: skip
        # Both operands are row-major over tokens, and the contraction runs over tokens, so each is
        # read transposed. dw1 needs the product the other way round than the gather allows (the
        # gathered matrix must be A), so its result is written through a transposed view.
        d = select(dw, [0, 2, 1]) if cutlass.const_expr(transpose) else dw
        # The tiles are added to dw by the copy engine's reducing store. Accumulation over
        # micro-batches thus needs no read of dw in the kernel.
        epilogue = arguments(add_to_output=True)
        gemm(select(tokens, [1, 0]), select(rows, [1, 0]), d, None, epilogue, tiles.schedule(max_clusters),
             # Experts cut the contraction (K), while in the other GEMMs they cut the rows of the
             # result (M).
             VarlenArguments(mCuSeqlensK=cu_rows, mAIdx=gather_index), stream)  # fmt: skip

    sixteen, (experts, rows, m, n) = _DTYPES[dtype], _sizes(4)
    return _compile(
        launch,
        _matrix(sixteen, _sizes(1)[0], m),
        _matrix(sixteen, rows, n),
        _matrix(Float32, experts, n, m) if transpose else _matrix(Float32, experts, m, n),
        _vector(Int32),
        _vector(Int32, rows),
    )


def _compile(launch, *fakes) -> Any:
    # The compiled function takes the stream from the tvm_ffi environment and not from an argument,
    # so the caller's current stream is used without a conversion per launch.
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *fakes, Int32(1), stream, options="--enable-tvm-ffi")


# Every call makes new symbols: sizes that must agree have to use the same symbol.
def _sizes(count: int) -> tuple[Any, ...]:
    return tuple(cute.sym_int() for _ in range(count))


def _matrix(dtype, *shape):
    """Row-major with free outer strides that keep rows on 16 bytes, as TMA needs."""
    return make_fake_tensor(
        dtype, shape, leading_dim=len(shape) - 1, divisibility=128 // dtype.width
    )


def _vector(dtype, size=None):
    return make_fake_tensor(
        dtype, (_sizes(1)[0] if size is None else size,), leading_dim=0, divisibility=4
    )
