"""The grouped GEMMs: four kernels, whose tiles each belong to one program, so that equal calls give
equal bits.

    up      z = x w1^T + b1, y1 = act(z)        x gathered
    rows    y2 = y1 w2^T + b2; dx = dz w1
    dgated  dy1 = dout w2; dz, y1s, dprobs      dout gathered
    wgrad   dw += left^T right                  over an expert's rows, one side gathered

Rows are in expert order and padded to a multiple of 128 per expert, so a tile of at most 128 rows
belongs to one expert. `cu_rows` int32 `[E+1]` cuts them, `tile_expert` int32 `[R / 128]` names the
expert of 128 rows, `index` int32 `[R]` holds a token in every row (`rows.py`). No program reads
what lies behind the rows in use or writes there.

z is stored in (gate, up) pairs, as w1 makes it. dz is stored gate first: `[R, 2, I]`. The product
with w1 then reads its rows with a stride, and a gradient of w1 can be written in any layout, which
a pair of neighbours in registers could not be.

Offsets are 64 bits where they count tokens or rows, and 32 bits inside a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ...jit.triton_kernel import stored_jit
from .activations import gated_gradients, gated_value, value_and_slope

_TILE_ROWS = tl.constexpr(128)


@triton.jit
def _place(tile, tiles_m, TILES_N: tl.constexpr, GROUP: tl.constexpr):
    # (m, n) of a tile. GROUP tiles along M are taken for every tile along N before the next ones,
    # so that programs which run at the same time share rows of both operands in L2.
    group = tile // (GROUP * TILES_N)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * TILES_N)
    return first + within % height, within // height


@triton.jit
def _product(
    a_rows,
    b_columns,
    in_width,
    K: tl.constexpr,
    STRIDE_K: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fp32 [M, N] from pointers to rows of A and to columns of B. With two parts A holds K values of
    # the first and then K of the second, and B takes them in turns.
    k = tl.arange(0, BLOCK)
    a = a_rows[:, None] + k[None, :]
    b = b_columns[None, :] + (k * (PARTS * STRIDE_K))[:, None]
    acc = tl.zeros([M, N], tl.float32)
    for step in range(0, PARTS * ((K + BLOCK - 1) // BLOCK)):
        part = step % PARTS
        first = step // PARTS * BLOCK
        a_step = part * K + first
        b_step = (first * PARTS + part).to(tl.int64) * STRIDE_K
        if K % BLOCK == 0:
            a_tile = tl.load(a + a_step)
            inside = in_width[None, :]
            b_tile = tl.load(b + b_step) if WHOLE else tl.load(b + b_step, mask=inside, other=0.0)
        else:
            known = first + k < K
            a_tile = tl.load(a + a_step, mask=known[None, :], other=0.0)
            b_tile = tl.load(b + b_step, mask=known[:, None] & in_width[None, :], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    return acc


@triton.jit
def _halves(acc, M: tl.constexpr, N: tl.constexpr):
    # The left and the right half of the columns. A thread holds columns of both, so nothing moves.
    return tl.split(tl.permute(tl.reshape(acc, [M, 2, N // 2]), [0, 2, 1]))


# An epilogue takes a tile in CHUNKS parts along its columns, one after the other, so that what it
# loads and computes beside the accumulator fits into the registers. The functions call themselves
# with half the columns; the compiler unfolds them.


@triton.jit
def _finish_up(
    acc,
    bias,
    z,
    y1,
    column,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    if CHUNKS > 1:
        low, high = _halves(acc, M, N)
        n: tl.constexpr = N // 2
        left: tl.constexpr = CHUNKS // 2
        _finish_up(low, bias, z, y1, column, WIDTH, KIND, P0, P1, GATED, M, n, left)
        _finish_up(high, bias, z, y1, column + n, WIDTH, KIND, P0, P1, GATED, M, n, left)
    else:
        m, n = tl.arange(0, M), tl.arange(0, N)
        inside = column + n < WIDTH
        if bias is not None:
            acc += tl.load(bias + column + n, mask=inside, other=0.0)[None, :]
        at = m[:, None] * WIDTH + n[None, :]
        if z is not None:
            tl.store(z + column + at, acc.to(z.dtype.element_ty), mask=inside[None, :])
        if y1 is not None:
            if GATED:
                gate, value = tl.split(tl.reshape(acc, [M, N // 2, 2]))
                result = gated_value(gate, value, KIND, P0, P1)
                half = tl.arange(0, N // 2)
                at_half = m[:, None] * (WIDTH // 2) + half[None, :]
                in_half = column // 2 + half < WIDTH // 2
                tl.store(
                    y1 + column // 2 + at_half,
                    result.to(y1.dtype.element_ty),
                    mask=in_half[None, :],
                )
            else:
                result, _ = value_and_slope(acc, KIND)
                tl.store(y1 + column + at, result.to(y1.dtype.element_ty), mask=inside[None, :])


@stored_jit(do_not_specialize=["num_experts"])
def up(
    x,
    w1,
    bias,
    z,
    y1,
    index,
    tile_expert,
    cu_rows,
    num_experts,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """x `[T, H]`, w1 `[E, WIDTH, H]`, bias fp32 `[E, WIDTH]` or None -> z `[R, WIDTH]` and y1
    `[R, I]`, each unless None.
    """
    tiles_n: tl.constexpr = (WIDTH + N - 1) // N
    whole: tl.constexpr = WIDTH % N == 0
    tiles_m = tl.load(cu_rows + num_experts) // M
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        expert = tl.load(tile_expert + tile_m * M // _TILE_ROWS).to(tl.int64)
        row, column = tile_m * M, tile_n * N
        m, n = tl.arange(0, M), tl.arange(0, N)
        inside = column + n < WIDTH
        token = tl.load(index + row + m).to(tl.int64)
        weights = w1 + (expert * WIDTH + column) * H
        acc = _product(x + token * H, weights + n * H, inside, H, 1, 1, whole, M, N, K)
        at_row = row.to(tl.int64)
        own_bias = None if bias is None else bias + expert * WIDTH
        own_z = None if z is None else z + at_row * WIDTH
        own_y1 = None if y1 is None else y1 + at_row * (WIDTH // 2 if GATED else WIDTH)
        _finish_up(acc, own_bias, own_z, own_y1, column, WIDTH, KIND, P0, P1, GATED, M, N, CHUNKS)


@stored_jit(do_not_specialize=["num_experts"])
def rows_product(
    a,
    weights,
    bias,
    out,
    tile_expert,
    cu_rows,
    num_experts,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """a `[R, PARTS * DEPTH]` -> out `[R, WIDTH]`, bias fp32 `[E, WIDTH]` or None.

    weights: `[E, WIDTH, DEPTH]`, or `[E, PARTS * DEPTH, WIDTH]` where TRANSPOSED, whose rows belong
    to the parts in turns.
    """
    tiles_n: tl.constexpr = (WIDTH + N - 1) // N
    whole: tl.constexpr = WIDTH % N == 0
    depth: tl.constexpr = PARTS * DEPTH
    stride_k: tl.constexpr = WIDTH if TRANSPOSED else 1
    stride_n: tl.constexpr = 1 if TRANSPOSED else DEPTH
    tiles_m = tl.load(cu_rows + num_experts) // M
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        expert = tl.load(tile_expert + tile_m * M // _TILE_ROWS).to(tl.int64)
        row, column = (tile_m * M).to(tl.int64), tile_n * N
        m, n = tl.arange(0, M), tl.arange(0, N)
        inside = column + n < WIDTH
        columns = weights + expert * (depth * WIDTH) + column.to(tl.int64) * stride_n
        a_rows = a + row * depth + m * depth
        acc = _product(
            a_rows, columns + n * stride_n, inside, DEPTH, stride_k, PARTS, whole, M, N, K
        )
        if bias is not None:
            acc += tl.load(bias + expert * WIDTH + column + n, mask=inside, other=0.0)[None, :]
        at = m[:, None] * WIDTH + n[None, :]
        result = acc.to(out.dtype.element_ty)
        tl.store(out + row * WIDTH + column + at, result, mask=inside[None, :])


@triton.jit
def _of_pairs(pairs, DTYPE: tl.constexpr):
    # Both 16-bit halves of int32 as fp32; the first in memory is the low one.
    if tl.bfloat16 == DTYPE:
        # A bfloat16 is the upper half of an fp32.
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _finish_dgated(
    dy1,
    z,
    dz,
    y1s,
    weight,
    column,
    I: tl.constexpr,
    KIND: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # fp32 [M]: <dy1, y1> over these columns
    if CHUNKS > 1:
        low, high = _halves(dy1, M, N)
        n: tl.constexpr = N // 2
        left: tl.constexpr = CHUNKS // 2
        return _finish_dgated(
            low, z, dz, y1s, weight, column, I, KIND, P0, P1, GATED, M, n, left
        ) + _finish_dgated(high, z, dz, y1s, weight, column + n, I, KIND, P0, P1, GATED, M, n, left)
    else:
        m, n = tl.arange(0, M), tl.arange(0, N)
        inside = (column + n < I)[None, :]
        at = column + m[:, None] * I + n[None, :]
        dtype: tl.constexpr = dz.dtype.element_ty
        if GATED:
            # 32-bit pairs, so that z has the shape of the accumulator. Two 16-bit tensors of twice
            # the width would have to be split, which takes more registers than there are.
            pairs = tl.load(z.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
            gate, value = _of_pairs(pairs, dtype)
            y1, dgate, dup = gated_gradients(gate, value, dy1 * weight, KIND, P0, P1)
            at_dz = dz + column + m[:, None] * (2 * I) + n[None, :]
            tl.store(at_dz, dgate.to(dtype), mask=inside)
            tl.store(at_dz + I, dup.to(dtype), mask=inside)
        else:
            given = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
            y1, slope = value_and_slope(given, KIND)
            tl.store(dz + at, (dy1 * weight * slope).to(dtype), mask=inside)
        tl.store(y1s + at, (y1 * weight).to(dtype), mask=inside)
        # Columns behind the last one have dy1 = 0 and y1 = act(0), which is finite.
        return tl.sum(dy1 * y1, 1)


@stored_jit(do_not_specialize=["num_experts", "num_rows"], do_not_specialize_on_alignment=["prob"])
def dgated(
    dout,
    w2,
    z,
    dz,
    y1s,
    prob,
    partials,
    index,
    tile_expert,
    cu_rows,
    num_experts,
    num_rows,
    H: tl.constexpr,
    I: tl.constexpr,
    KIND: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """dout `[T, H]`, w2 `[E, H, I]`, z `[R, 2I]` in pairs (ungated: `[R, I]`), prob fp32 `[R]` ->
    dz `[R, 2, I]` (ungated: `[R, I]`), y1s `[R, I]`, partials fp32 `[tiles along I, R]` of
    `<dy1, y1>`.
    """
    tiles_n: tl.constexpr = (I + N - 1) // N
    whole: tl.constexpr = I % N == 0
    tiles_m = tl.load(cu_rows + num_experts) // M
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        expert = tl.load(tile_expert + tile_m * M // _TILE_ROWS).to(tl.int64)
        row, column = (tile_m * M).to(tl.int64), tile_n * N
        m, n = tl.arange(0, M), tl.arange(0, N)
        inside = column + n < I
        token = tl.load(index + row + m).to(tl.int64)
        columns = w2 + expert * (H * I) + column + n
        dy1 = _product(dout + token * H, columns, inside, H, I, 1, whole, M, N, K)
        weight = tl.load(prob + row + m)[:, None]
        parts: tl.constexpr = 2 if GATED else 1
        own_z, own_dz, own_y1s = z + row * (parts * I), dz + row * (parts * I), y1s + row * I
        sums = _finish_dgated(
            dy1, own_z, own_dz, own_y1s, weight, column, I, KIND, P0, P1, GATED, M, N, CHUNKS
        )
        tl.store(partials + tile_n.to(tl.int64) * num_rows + row + m, sums)


@triton.jit
def _finish_wgrad(
    acc,
    target,
    pitch,
    in_m,
    column,
    adds,
    WIDTH: tl.constexpr,
    STEP_M: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    if CHUNKS > 1:
        low, high = _halves(acc, M, N)
        n: tl.constexpr = N // 2
        left: tl.constexpr = CHUNKS // 2
        _finish_wgrad(low, target, pitch, in_m, column, adds, WIDTH, STEP_M, M, n, left)
        _finish_wgrad(high, target, pitch, in_m, column + n, adds, WIDTH, STEP_M, M, n, left)
    else:
        m, n = tl.arange(0, M), tl.arange(0, N)
        if STEP_M == 0:
            places = target + column + m[:, None] * pitch + n[None, :]
        else:
            rows = target + column.to(tl.int64) * pitch
            places = rows + m[:, None] * STEP_M + n[None, :] * pitch
        inside = in_m[:, None] & (column + n < WIDTH)[None, :]
        element: tl.constexpr = target.dtype.element_ty
        if element == tl.float32:
            acc += tl.load(places, mask=inside & (adds != 0), other=0.0)
        tl.store(places, acc.to(element), mask=inside)


@triton.jit
def _sums_of_rows(
    left,
    right,
    index,
    first,
    last,
    part,
    row,
    column,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT_GATHERED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """fp32 `[M, N]`: the tile of `left^T right` over one expert's rows; see `wgrad`."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    in_m, in_n = row + m < HEIGHT, column + n < WIDTH
    left_columns = left + part * HEIGHT + row + m
    right_columns = right + column + n
    acc = tl.zeros([M, N], tl.float32)
    # The padding rows of the side in expert order are zeros, and those of the gathered side
    # repeat a row of the expert: no product needs a mask along the rows.
    for at in range(first, last, K):
        token = tl.load(index + at + k).to(tl.int64)
        own = at + k.to(tl.int64)
        left_row = (token if LEFT_GATHERED else own) * (PARTS * HEIGHT)
        right_row = (own if LEFT_GATHERED else token) * WIDTH
        left_at = left_columns[:, None] + left_row[None, :]
        right_at = right_row[:, None] + right_columns[None, :]
        left_tile = (
            tl.load(left_at) if HEIGHT % M == 0 else tl.load(left_at, mask=in_m[:, None], other=0.0)
        )
        right_tile = (
            tl.load(right_at)
            if WIDTH % N == 0
            else tl.load(right_at, mask=in_n[None, :], other=0.0)
        )
        acc = tl.dot(left_tile, right_tile, acc)
    return acc


@stored_jit(
    do_not_specialize=["num_experts", "tabled", "adds", "stride_expert", "stride_part", "pitch"],
    do_not_specialize_on_alignment=["addresses"],
)
def wgrad(
    left,
    right,
    index,
    cu_rows,
    out,
    addresses,
    num_experts,
    tabled,
    adds,
    stride_expert,
    stride_part,
    pitch,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT_GATHERED: tl.constexpr,
    STEP_M: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """`out[e][part, m, n] += left[r, part, m] right[r, n]`, summed over the rows r of e.

    left `[., PARTS * HEIGHT]`, right `[., WIDTH]`: one of them tokens, read through `index`, the
    other one in expert order. out: its matrices are `stride_expert` apart; or, where `tabled`,
    they begin at `addresses` int64 `[E]`, 0 for one that nobody wants. Where STEP_M is 0, columns
    are contiguous and rows are `pitch` apart. Else rows are STEP_M apart, 1 or (gate and up in
    turns) 2, and columns `pitch`. `pitch` counts 16 bytes, and so does `stride_part` unless STEP_M
    is 2. Strides are not specialised, because a layout must not be a key.

    The sums are added where `adds`, which needs fp32; else written, zeros for an expert without
    rows.
    """
    tiles_m: tl.constexpr = (HEIGHT + M - 1) // M
    tiles_n: tl.constexpr = (WIDTH + N - 1) // N
    per_expert: tl.constexpr = PARTS * tiles_m * tiles_n
    element: tl.constexpr = out.dtype.element_ty
    for tile in range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        tile_m, tile_n = _place(tile % per_expert, PARTS * tiles_m, tiles_n, GROUP)
        part, row, column = tile_m // tiles_m, tile_m % tiles_m * M, tile_n * N
        first, last = tl.load(cu_rows + expert), tl.load(cu_rows + expert + 1)
        # One variant serves stacked matrices and separate ones.
        address = (out + tl.cast(expert, tl.int64) * stride_expert).to(tl.int64)
        if tabled != 0:
            address = tl.load(addresses + expert)
        # An expert without rows adds nothing, and its memory is left untouched.
        if (address != 0) & ((adds == 0) | (first < last)):
            acc = _sums_of_rows(
                left, right, index, first, last, part, row, column,
                HEIGHT, WIDTH, PARTS, LEFT_GATHERED, M, N, K,
            )  # fmt: skip
            in_m = row + tl.arange(0, M) < HEIGHT
            # The compiler knows of these products that they are multiples of 16 bytes.
            unit: tl.constexpr = 128 // element.primitive_bitwidth
            step = pitch * unit
            between_parts = stride_part * (1 if STEP_M == 2 else unit)
            target = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
            target += tl.cast(part, tl.int64) * between_parts
            target += row.to(tl.int64) * (step if STEP_M == 0 else STEP_M)
            _finish_wgrad(acc, target, step, in_m, column, adds, WIDTH, STEP_M, M, N, CHUNKS)
