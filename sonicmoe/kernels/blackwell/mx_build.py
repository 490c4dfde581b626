"""Compile the block-scaled grouped GEMMs of quack-kernels (compute capability 10.0 and 10.3) for fake
tensors of symbolic size: imported by build processes only.

As `quack_build`, but that operands are MXFP8: uint8 E4M3 codes, and uint8 scales in atoms of 512
bytes (`engine/blackwell/mx.py`). Frameworks need no dtype for either, because both are retyped while tracing. R
rows in expert order; `cu_rows` int32 `[E+1]` cuts them into experts. Scales of rows, whose atoms are
ragged, are `[A, B, 512]` for operands contracted over their columns, and `[B, A, 512]` for operands
contracted over the rows; those of weights have E in front.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Uint8, cute
from quack.compile_utils import make_fake_tensor
from quack.epilogue.frontend import EpiMod, gemm_epilogue
from quack.epilogue.math import unpack
from quack.epilogue.quantize_out import BlockScaleFactorStore
from quack.gemm_default_epi import GemmDefaultSm100
from quack.layout_utils import select
from quack.rounding import RoundingMode
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

from .quack_build import _compile, _matrix, _sizes, _vector
from .quack_epilogues import dgated_epilogue, gate_functions

_SM100 = 10
_BLOCK = 32
_ATOM_BYTES = 512


def compile_up(*, activation: str, parameters: str = "", store_z: bool, **tiling) -> Any:
    """`f(x [R, H], x_scale, w1 [E, N1, H], w1_scale, z bf16 [R, N1] | None, y1 [R, I], y1_scale,
    cu_rows, max_clusters)`: y1 leaves quantised per row and 32.
    """
    mod = up_epilogue(activation, parameters, store_z=store_z)
    gemm, arguments, schedule = _fused(mod, (), paired=True, **tiling)

    @cute.jit
    def launch(x: cute.Tensor, x_scale: cute.Tensor, w1: cute.Tensor, w1_scale: cute.Tensor, z, y1: cute.Tensor,
               y1_scale: cute.Tensor, cu_rows: cute.Tensor, max_clusters: Int32, stream):  # fmt: skip
        epilogue = arguments(y1=_codes(y1), y1_scale=_scales(y1_scale))
        gemm(_codes(x), _codes(w1), z, None, epilogue, schedule(max_clusters),
             VarlenArguments(mCuSeqlensM=cu_rows), stream, _scales(x_scale), _scales(w1_scale))  # fmt: skip

    experts, rows, n1, hidden, inner = _sizes(5)
    return _compile(
        launch,
        _matrix(Uint8, rows, hidden),
        _atoms(),
        _matrix(Uint8, experts, n1, hidden),
        _atoms(experts),
        _matrix(BFloat16, rows, n1) if store_z else None,
        _matrix(Uint8, rows, inner),
        _atoms(),
        _vector(Int32),
    )


def compile_down(*, transpose: bool, **tiling) -> Any:
    """`f(a [R, K], a_scale, w, w_scale, d bf16 [R, N], cu_rows, max_clusters)`; w: `[E, N, K]`, or
    `[E, K, N]` when `transpose`, with the scales of that contraction.
    """
    gemm, arguments, schedule = _plain(**tiling)
    gemm.b_transposed = transpose

    @cute.jit
    def launch(a: cute.Tensor, a_scale: cute.Tensor, w: cute.Tensor, w_scale: cute.Tensor, d: cute.Tensor,
               cu_rows: cute.Tensor, max_clusters: Int32, stream):  # fmt: skip
        gemm(_codes(a), _codes(w), d, None, arguments(), schedule(max_clusters),
             VarlenArguments(mCuSeqlensM=cu_rows), stream, _scales(a_scale), _scales(w_scale))  # fmt: skip

    experts, rows, n, k = _sizes(4)
    return _compile(
        launch,
        _matrix(Uint8, rows, k),
        _atoms(),
        _matrix(Uint8, experts, k, n) if transpose else _matrix(Uint8, experts, n, k),
        _atoms(experts),
        _matrix(BFloat16, rows, n),
        _vector(Int32),
    )


def compile_dgated(*, activation: str, parameters: str = "", **tiling) -> Any:
    """`f(dout [R, H], dout_scale, w2 [E, H, I], w2_scale, dz bf16 [R, N1], z bf16 [R, N1], y1s bf16
    [R, I], prob [R], dprob [R, tiles], cu_rows, max_clusters)`.

    dz and y1s leave in bf16: quack quantises no output beside a packed one, and dz needs the scales
    of both contractions.
    """
    mod = dgated_epilogue(activation, parameters, gated=True)
    gemm, arguments, schedule = _fused(mod, (("c", "c"), ("prob", "col")), packed=True, **tiling)
    gemm.b_transposed = True

    @cute.jit
    def launch(dout: cute.Tensor, dout_scale: cute.Tensor, w2: cute.Tensor, w2_scale: cute.Tensor, dz: cute.Tensor,
               z: cute.Tensor, y1s: cute.Tensor, prob: cute.Tensor, dprob: cute.Tensor, cu_rows: cute.Tensor,
               max_clusters: Int32, stream):  # fmt: skip
        gemm(_codes(dout), _codes(w2), dz, z, arguments(prob=prob, y1s=y1s, dprob=dprob), schedule(max_clusters),
             VarlenArguments(mCuSeqlensM=cu_rows), stream, _scales(dout_scale), _scales(w2_scale))  # fmt: skip

    experts, rows, n1, inner, hidden = _sizes(5)
    return _compile(
        launch,
        _matrix(Uint8, rows, hidden),
        _atoms(),
        _matrix(Uint8, experts, hidden, inner),
        _atoms(experts),
        _matrix(BFloat16, rows, n1),
        _matrix(BFloat16, rows, n1),
        _matrix(BFloat16, rows, inner),
        _vector(Float32, rows),
        make_fake_tensor(Float32, (rows, _sizes(1)[0]), leading_dim=1, divisibility=1),
        _vector(Int32),
    )


def compile_wgrad(*, halves: bool, **tiling) -> Any:
    """`f(left [R, M], left_scale, right [R, N], right_scale, dw fp32 [E, M, N], cu_rows,
    max_clusters)`: `dw[e] += left^T right` over the rows of e, whose last axis is contiguous.

    `halves`: the even rows of the product come first in dw, and the odd ones behind them. Every
    element is added to by one thread block, so equal calls give equal bits; an expert without rows
    has +0 added.
    """
    gemm, arguments, schedule = _plain(concat_layout=("out",) if halves else None, **tiling)

    @cute.jit
    def launch(left: cute.Tensor, left_scale: cute.Tensor, right: cute.Tensor, right_scale: cute.Tensor,
               dw: cute.Tensor, cu_rows: cute.Tensor, max_clusters: Int32, stream):  # fmt: skip
        # Both are read transposed, because the contraction runs over the rows.
        a, b = select(_codes(left), [1, 0]), select(_codes(right), [1, 0])
        gemm(a, b, dw, None, arguments(add_to_output=True), schedule(max_clusters),
             VarlenArguments(mCuSeqlensK=cu_rows), stream, _scales(left_scale), _scales(right_scale))  # fmt: skip

    experts, rows, m, n = _sizes(4)
    return _compile(
        launch,
        _matrix(Uint8, rows, m),
        _atoms(),
        _matrix(Uint8, rows, n),
        _atoms(),
        _matrix(Float32, experts, m, n),
        _vector(Int32),
    )


@functools.cache
def up_epilogue(activation: str, parameters: str, *, store_z: bool) -> EpiMod:
    """`z = acc` as D when `store_z`, `y1 = act(z)` as the quantised output "y1", whose scales go to
    "y1_scale".
    """
    act = gate_functions(activation, parameters)[0]

    def finish(acc):
        y1 = act(*unpack(acc))
        # An infinity becomes NaN here, which has a code of its own and no say in the scale. Scales
        # of one byte know no infinity: a saturated one, behind a small weight, would be finite.
        # Finite values stay as they are. (Written with a product, this crashes the vectoriser.)
        y1 = y1 - (y1 - y1)
        return {"D": acc, "y1": y1} if store_z else {"y1": y1}

    quantiser = BlockScaleFactorStore("y1_scale", output="y1")
    return gemm_epilogue(outputs=("y1",), extra_ops=(quantiser,), mode="acc_pair")(finish)


def _plain(**tiling):
    """The GEMM object without an epilogue of ours, its argument tuple type and its schedule."""
    return _gemm(GemmDefaultSm100, **tiling)


def _fused(mod: EpiMod, kinds, *, paired=False, packed=False, **tiling):
    """A GEMM that runs `mod`, as `_gemm` returns one."""
    cls = mod._mint(kinds, _SM100, paired, packed, (), RoundingMode.RN, (), False)
    gemm, arguments, schedule = _gemm(cls, **tiling)
    if packed:
        gemm.cd_packed, gemm.implicit_dtype = "n", BFloat16
    return gemm, arguments, schedule


def _gemm(cls, *, tile, cluster, swizzle: int, clc: bool, concat_layout=None):
    gemm = cls(
        Float32,
        Float8E4M3FN,
        tuple(tile),
        (*cluster, 1),
        sf_vec_size=_BLOCK,
        # quack gathers no scales: with a gather the kernel's barriers would wait for scales that no
        # instruction loads.
        gather_A=False,
        use_clc_persistence=clc,
        concat_layout=concat_layout,
        use_pdl=False,
    )

    def schedule(max_clusters) -> TileSchedulerOptions:
        return TileSchedulerOptions(
            max_active_clusters=max_clusters, max_swizzle_size=Int32(swizzle)
        )

    return gemm, cls.EpilogueArguments, schedule


def _codes(held):
    return cute.recast_tensor(held, Float8E4M3FN)


def _scales(atoms):
    """`[A, B, 512]`, or `[E, A, B, 512]`, as quack wants it: `[1 or E, A, B, 32, 4, 4]`."""
    shape, stride = atoms.shape, atoms.stride
    if cutlass.const_expr(cute.rank(atoms) == 4):
        lead, outer = shape[:3], stride[:3]
    else:
        # One matrix, as far from a second one as quack's own callers have it. A stride of 0 would
        # be another kind of tensor map.
        whole = cute.assume(cutlass.Int64(shape[0]) * stride[0], divby=_ATOM_BYTES)
        lead, outer = (1, *shape[:2]), (whole, *stride[:2])
    layout = cute.make_layout((*lead, 32, 4, 4), stride=(*outer, 16, 4, 1))
    return cute.recast_tensor(cute.make_tensor(atoms.iterator, layout), Float8E8M0FNU)


def _atoms(experts=None):
    """Contiguous but for the outermost stride, which is a multiple of an atom."""
    outer = (*(() if experts is None else (experts,)), *_sizes(2))
    strides = tuple(cute.sym_int64(divisibility=_ATOM_BYTES) for _ in outer[:-1])
    return cute.runtime.make_fake_tensor(
        Uint8, (*outer, _ATOM_BYTES), stride=(*strides, _ATOM_BYTES, 1), assumed_align=16
    )
