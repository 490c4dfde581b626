"""Inputs of the routing contract, every kind that it calls ordinary, and kernels beside plain operations
on them, bit for bit: shared by the tests on a host, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sonicmoe.routing.backends import PlainKernels
from sonicmoe.routing.build import num_rows_bound

Case = tuple[str, torch.Tensor, int]
PLAIN = PlainKernels()


def distinct_probs(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Another probability in every valid slot, so that no permutation goes unnoticed; NaN where
    nothing is routed.
    """
    size = indices.shape[0] * indices.shape[1]
    parts = (torch.arange(size, dtype=torch.float64, device=indices.device) + 1).div(size + 1)
    probs = parts.to(torch.float32).reshape(indices.shape)
    valid = (indices >= 0) & (indices < num_experts)
    return torch.where(valid, probs, torch.full_like(probs, float("nan")))


def built_by(kernels, indices, probs, num_experts, counts=None, alignment=128):
    """The metadata of one implementation, sized as the builder sizes it."""
    rows = num_rows_bound(indices.numel(), num_experts, alignment, counts)
    return kernels.build(indices, probs, num_experts, alignment, rows)


def moved_by(kernels, values, index):
    """fp32 values to where `index` names them, zeros elsewhere."""
    out = torch.empty(tuple(index.shape), dtype=torch.float32, device=values.device)
    kernels.gather_or_zero(index, values, out)
    return out


def summed_by(kernels, rows, routing, *, weighted, dtype=None):
    """`[R, H]` -> `[T, H]`."""
    shape = (routing.num_tokens, rows.shape[1])
    out = torch.empty(shape, dtype=dtype or rows.dtype, device=rows.device)
    kernels.aggregate_rows(rows, routing.slot_row, routing.row_prob, out, weighted)
    return out


def topk_of(tokens: int, topk: int, global_experts: int, seed: int) -> torch.Tensor:
    """Distinct ids in each row, as a router gives them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, global_experts, generator=generator).topk(topk, dim=1).indices


def sentinels(indices: torch.Tensor, num_experts: int, spelling: int) -> torch.Tensor:
    """Ids of other ranks spelled -1 (0), `num_experts` (1) or left as they are (2)."""
    if spelling == 2:
        return indices
    value = -1 if spelling == 0 else num_experts
    return torch.where(indices < num_experts, indices, torch.full_like(indices, value))


def corpus(scale: int = 1) -> Iterator[Case]:
    """(name, int64 indices, num_experts); `scale` multiplies the tokens of the bulk cases."""
    for tokens in (0, 1, 2, 127, 128, 129):
        yield f"tokens{tokens}", topk_of(tokens, 2, 4, tokens), 4
    for topk in (1, 3, 5, 8, 16, 32):
        yield f"topk{topk}", sentinels(topk_of(40 * scale, topk, 48, topk), 33, topk % 3), 33
    for experts in (1, 2, 8, 31, 32, 33, 64, 128, 129, 256, 511, 512):
        local = topk_of(50 * scale, min(8, experts), experts + experts // 2 + 1, experts)
        yield f"experts{experts}", sentinels(local, experts, experts % 3), experts
    yield "all_invalid", torch.full((100 * scale, 4), -1), 8
    yield "all_on_one", torch.full((300 * scale, 1), 5), 8
    generator = torch.Generator().manual_seed(1)
    yield "repeated_ids", torch.randint(-1, 6, (150 * scale, 4), generator=generator), 5
    rare = torch.rand(200 * scale, 8, generator=torch.Generator().manual_seed(2)) < 0.01
    yield "99_percent_invalid", torch.where(rare, topk_of(200 * scale, 8, 16, 3), -1), 16
    extreme = topk_of(64, 4, 8, 4)
    extreme[::3, 1], extreme[1::3, 0], extreme[2::3, 2] = 2**31 - 1, -(2**31), 8
    yield "extreme_ids", extreme, 8
    # ids that differ from valid ones only above bit 32
    high = topk_of(64, 4, 8, 5)
    high[::2, 3] += 2**32
    yield "ids_past_32_bits", high, 8


def sorted_by(kernels, counts, probs, num_tokens, given=None, alignment=128):
    """The metadata of rows in expert order by one implementation, sized as the builder sizes it."""
    rows = num_rows_bound(num_tokens, counts.numel(), alignment, given)
    return kernels.build_sorted(counts, probs, num_tokens, alignment, rows)


def sorted_corpus(scale: int = 1) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(name, int64 counts, tokens): zeros anywhere, rows beyond the sum, and counts that no rows
    have, which a GPU cannot refuse.
    """
    for experts in (1, 2, 8, 33, 128, 512):
        counts = torch.randint(
            0, 3 * scale, (experts,), generator=torch.Generator().manual_seed(experts)
        )
        counts[:: 2 + experts % 3] = 0
        yield f"experts{experts}", counts, int(counts.sum()) + experts % 5
    yield "around the tile", torch.tensor([127, 128, 129, 0, 1, 0]), 400
    yield "nothing", torch.zeros(4, dtype=torch.int64), 0
    yield "only rows beyond", torch.zeros(4, dtype=torch.int64), 300 * scale
    yield "all on one", torch.tensor([0, 0, 700 * scale, 0]), 700 * scale
    yield "more than there are", torch.tensor([100, 2**40, 50]), 300
    yield "below zero", torch.tensor([20, -5, 10]), 40


# ---- beside plain operations ----


def assert_same(ours, wanted, label):
    for name, one, other in zip(ours.TENSOR_FIELDS, ours.tensors(), wanted.tensors(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), (label, name)


def check_built(kernels, indices, experts, label="", alignment=128, counts=None):
    """The metadata of these kernels."""
    given = indices, distinct_probs(indices, experts), experts, counts, alignment
    ours = built_by(kernels, *given)
    assert_same(ours, built_by(PLAIN, *given), label)
    return ours


def check_sorted(kernels, dtype, device, most=512, scale=1):
    """Rows in expert order, with probabilities and without."""
    for name, wide, tokens in sorted_corpus(scale):
        if wide.numel() > most:
            continue
        counts = wide.clamp(max=torch.iinfo(dtype).max).to(device, dtype)
        probs = distinct_probs(torch.zeros((tokens, 1), device=device), 1).reshape(-1)
        for given in (probs, None):
            wanted = sorted_by(PLAIN, counts, given, tokens)
            assert_same(sorted_by(kernels, counts, given, tokens), wanted, name)


def check_slot_values(kernels, routing, label=""):
    """Values of slots to rows, and of rows back, where padding rows hold NaN."""
    generator = torch.Generator().manual_seed(7)
    slots = torch.randn(routing.slot_row.numel(), generator=generator)
    rows = torch.randn(routing.num_rows, generator=generator)
    slots, rows = (values.to(routing.slot_row.device) for values in (slots, rows))
    rows[routing.row_token < 0] = float("nan")
    for values, index in ((slots, routing.row_token.long()), (rows, routing.slot_row)):
        moved = moved_by(kernels, values, index)
        assert torch.equal(moved, moved_by(PLAIN, values, index)), label
        assert bool((moved[index < 0] == 0).all()), label


def check_sums(kernels, routing, width, dtype, weighted, out=None):
    """Rows of tokens, of random values; padding rows are NaN, which no result may show."""
    generator = torch.Generator(routing.slot_row.device).manual_seed(9)
    shape, device = (routing.num_rows, width), routing.slot_row.device
    rows = torch.randn(shape, generator=generator, device=device).to(dtype)
    rows[routing.row_token < 0] = float("nan")
    options = {"weighted": weighted, "dtype": out or dtype}
    ours, wanted = (summed_by(each, rows, routing, **options) for each in (kernels, PLAIN))
    assert torch.equal(ours, wanted), (width, dtype, weighted, out)
