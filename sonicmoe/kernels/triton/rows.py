"""What the grouped GEMMs need beside the products: which expert and token a row belongs to, row
sums, column sums per expert, addresses as a tensor. Counterpart of `cuda/expert_rows.cu`; sums have
a fixed order of additions, so equal calls give equal bits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl

from ...jit.triton_kernel import stored_jit

TILE_ROWS = 128


# Routing metadata may come as views into other tensors: their addresses must not be keys.
@stored_jit(
    do_not_specialize=["num_experts", "num_rows"],
    do_not_specialize_on_alignment=["row_token", "expert_counts", "padded_offsets"],
)
def index_rows(
    row_token,
    expert_counts,
    padded_offsets,
    index,
    tile_expert,
    cu_rows,
    num_experts,
    num_rows,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Fill index `[R]`, tile_expert `[R / 128]` and cu_rows `[E + 1]`, all int32; one program per
    128 rows, and at least one.

    A padding row is given the token of its expert's last true row: it is finite wherever that
    expert's true rows are. Counts that were too small on the host leave fewer rows than the offsets
    say, so no offset passes `num_rows`.
    """
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * ROWS
    if tile == 0:
        tl.store(cu_rows, 0)
    expert = 0
    for start in range(0, num_experts, EXPERTS):
        experts = start + tl.arange(0, EXPERTS)
        known = experts < num_experts
        ends = tl.load(padded_offsets + 1 + experts, mask=known, other=0)
        if tile == 0:
            clipped = tl.minimum(ends, num_rows.to(tl.int64)).to(tl.int32)
            tl.store(cu_rows + 1 + experts, clipped, mask=known)
        # Experts without rows end where they begin, and so before every row behind them.
        expert += tl.sum((known & (ends <= first)).to(tl.int32), 0)
    used = expert < num_experts
    begin = tl.load(padded_offsets + expert, mask=used, other=0)
    count = tl.load(expert_counts + expert, mask=used, other=0)
    last = tl.minimum(tl.maximum(begin + count - 1, 0), num_rows - 1)
    spare = tl.load(row_token + last, mask=used & (num_rows > 0), other=0)
    rows = first + tl.arange(0, ROWS)
    token = tl.load(row_token + rows, mask=rows < num_rows, other=-1)
    token = tl.maximum(tl.where(token < 0, spare, token), 0)
    tl.store(index + rows, token, mask=rows < num_rows)
    if first < num_rows:
        tl.store(tile_expert + tile, tl.where(used, expert, 0))


@stored_jit(do_not_specialize=["num_experts", "num_rows", "tiles"])
def row_sums(
    partials,
    values,
    bias,
    index,
    tile_expert,
    cu_rows,
    out,
    num_experts,
    num_rows,
    tiles,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """partials fp32 `[tiles, R]` -> out fp32 `[R]`: sums over the tiles, plus `<values[index[r]],
    bias[expert of r]>` unless bias is None; 0 in rows behind the last expert's.
    """
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    used = rows < tl.load(cu_rows + num_experts)
    total = tl.zeros([ROWS], tl.float32)
    at = partials + rows
    for _ in range(0, tiles):
        total += tl.load(at, mask=used, other=0.0)
        at += num_rows
    if bias is not None:
        expert = tl.load(tile_expert + first // TILE).to(tl.int64)
        token = tl.load(index + rows, mask=used, other=0).to(tl.int64)
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < WIDTH
            given = tl.load(
                values + token[:, None] * WIDTH + column[None, :],
                mask=used[:, None] & inside[None, :],
                other=0.0,
            )
            weight = tl.load(bias + expert * WIDTH + column, mask=inside, other=0.0)
            product += given.to(tl.float32) * weight[None, :]
        # A row that nobody owns has values of 0, and an infinite bias would make them NaN.
        total += tl.where(used, tl.sum(product, 1), 0.0)
    tl.store(out + rows, total, mask=rows < num_rows)


@stored_jit(do_not_specialize_on_alignment=["weight"])
def column_sums(
    values,
    index,
    weight,
    cu_rows,
    out,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[e][c] += sum over the rows r of e of values[r][c]`, or, GATHERED, of `weight[r] *
    values[index[r]][c]`; values `[., WIDTH]`, out fp32 `[E, WIDTH]`. With two parts the columns of
    out take theirs in turns.
    """
    expert = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    first, last = tl.load(cu_rows + expert), tl.load(cu_rows + expert + 1)
    if first < last:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(first, last, ROWS):
            rows = at + tl.arange(0, ROWS)
            source = tl.load(index + rows) if GATHERED else rows
            places = source.to(tl.int64)[:, None] * WIDTH + column[None, :]
            given = tl.load(values + places, mask=inside[None, :], other=0.0).to(tl.float32)
            if GATHERED:
                given = given * tl.load(weight + rows)[:, None]
            total += given
        half: tl.constexpr = WIDTH // PARTS
        target = out + expert.to(tl.int64) * WIDTH + column % half * PARTS + column // half
        sums = tl.load(target, mask=inside, other=0.0) + tl.sum(total, 0)
        tl.store(target, sums, mask=inside)


@stored_jit(do_not_specialize=["first", "count"])
def write_addresses(
    out,
    first,
    count,
    a0: tl.int64,
    a1: tl.int64,
    a2: tl.int64,
    a3: tl.int64,
    a4: tl.int64,
    a5: tl.int64,
    a6: tl.int64,
    a7: tl.int64,
):
    """Eight int64 arguments into out from `first` on, as far as `count`.

    A copy from the host would wait for the device, and cannot be captured into a CUDA graph.
    """
    for lane in tl.static_range(8):
        if first + lane < count:
            if lane == 0:
                tl.store(out + first, a0)
            elif lane == 1:
                tl.store(out + first + 1, a1)
            elif lane == 2:
                tl.store(out + first + 2, a2)
            elif lane == 3:
                tl.store(out + first + 3, a3)
            elif lane == 4:
                tl.store(out + first + 4, a4)
            elif lane == 5:
                tl.store(out + first + 5, a5)
            elif lane == 6:
                tl.store(out + first + 6, a6)
            else:
                tl.store(out + first + 7, a7)
