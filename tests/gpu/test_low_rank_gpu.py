"""The narrow products of low-rank adapters on the GPU against fp64. Whole layers have test_oracle_gpu.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu.engine_cases import ARCH, BF16, DEVICE
from gpu.kernel_checks import poisoned
from pairwise import pairwise

from sonicmoe.interop import current_stream
from sonicmoe.kernels.cuda_wgrad import low_rank_source
from sonicmoe.quant.recipes import BlockShape, iso, rows
from sonicmoe.quant.reference import dequantize, quantize, transpose_storage
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def module():
    return low_rank_source(ARCH).load()


class Rows:
    """Rows of a wide operand, as a kernel takes them and as fp64 has them; what no row names is NaN."""

    def __init__(self, kind, wide, *, tokens=500, experts=5, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        ids = torch.rand((tokens, experts - 1), generator=generator, device=DEVICE).argsort(1)[
            :, :2
        ]
        ids[torch.rand((tokens, 2), generator=generator, device=DEVICE) < 0.3] = experts
        probs = torch.rand((tokens, 2), generator=generator, device=DEVICE) + 0.1
        self.routing, self.experts, self.wide = build_routing(ids, probs, experts), experts, wide
        self.real = self.routing.row_token >= 0
        self.gathers = kind.startswith("tokens")
        count = tokens if self.gathers else self.routing.num_rows
        values = torch.randn((count, wide), generator=generator, device=DEVICE)
        values *= torch.exp2(torch.randint(-6, 6, (1, wide), generator=generator, device=DEVICE))
        self.transposed, self.scale = kind == "transposed codes", None
        dtype = torch.float16 if kind.endswith("fp16") else torch.bfloat16
        if kind.endswith("codes"):
            block = {"block codes": BlockShape(128, 256), "transposed codes": iso(128)}
            q = quantize(values, block.get(kind, rows(128)))
            exact = dequantize(q).double()
            q = transpose_storage(q) if self.transposed else q
            self.given, self.scale = q.codes.view(torch.uint8), q.scale_inv
        else:
            self.given = values.to(dtype)
            exact = self.given.double()
        token = self.routing.row_token.long().clamp(min=0)
        found = exact[token] if self.gathers else exact
        self.exact = torch.where(self.real.unsqueeze(1), found, 0.0)
        self.dtype = dtype
        if self.gathers:
            unused = torch.ones(count, dtype=torch.bool, device=DEVICE)
            unused[token[self.real]] = False
            if self.scale is None:
                self.given[unused] = float("nan")
            else:
                self.given[unused], self.scale[unused] = 0x7F, float("nan")

    @property
    def where(self):
        return self.routing.row_token, self.routing.padded_offsets

    def expert_rows(self):
        ends = self.routing.padded_offsets.tolist()
        return [slice(*both) for both in itertools.pairwise(ends)]


KINDS = ("tokens", "tokens codes", "tokens fp16", "rows", "rows codes", "block codes")


def odd_width(kind):
    """Of no whole number of 128 columns; of values an odd number of eight, the fewest of a row."""
    return 272 if kind.endswith("codes") else 264


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_rows(module, kind):
    for width, wide in itertools.product((8, 16, 40, 64, 128), (64, odd_width(kind), 1024)):
        given = Rows(kind, wide, seed=width)
        factor = torch.randn((given.experts, width, wide), device=DEVICE).to(given.dtype)
        out = poisoned((given.routing.num_rows, width), given.dtype)
        module.narrow_rows(
            *(given.given, given.scale, given.gathers, factor, *given.where, out, 0.75),
            current_stream(out),
        )
        for expert, own in enumerate(given.expert_rows()):
            wanted = 0.75 * given.exact[own] @ factor[expert].double().T
            error = (out[own].double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            assert float(error) < 3e-3, (wide, expert, float(error))
        assert not out[~given.real].any()


@pytest.mark.parametrize(
    ("kind", "rank", "wide_first"),
    pairwise([*KINDS, "transposed codes"], [3, 16, 40, 64, 128], [False, True]),
)
def test_narrow_gradient(module, kind, rank, wide_first):
    """Also of few experts with many rows, which several CTAs share; bit for bit again."""
    width = -(-rank // 8) * 8
    for wide, tokens in ((odd_width(kind), 500), (1024, 6000)):
        given = Rows(kind, wide, tokens=tokens, experts=3, seed=rank)
        routing = given.routing
        narrow = torch.randn((routing.num_rows, width), device=DEVICE).to(given.dtype)
        narrow[~given.real] = 0
        prob = routing.row_prob if given.gathers else None
        shape = (wide, rank) if wide_first else (rank, wide)
        sizes = routing.num_rows, given.experts, wide, width, rank
        parts = poisoned((int(module.gradient_parts(*sizes)),), torch.float32)
        results = []
        for _ in range(2):
            out = poisoned((given.experts, *shape), torch.float32)
            module.narrow_gradient(
                *(given.given, given.scale, given.gathers, given.transposed, narrow, prob),
                *(*given.where, wide_first, parts, out, current_stream(out)),
            )
            results.append(out)
        assert torch.equal(*results)
        weight = 1.0 if prob is None else prob.double().unsqueeze(1)
        thin = torch.where(given.real.unsqueeze(1), narrow.double() * weight, 0.0)
        for expert, own in enumerate(given.expert_rows()):
            wanted = thin[own, :rank].T @ given.exact[own]
            wanted = wanted.T if wide_first else wanted
            error = (out[expert].double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            assert float(error) < 4e-3, (wide, expert, float(error))


@pytest.mark.parametrize("kind", ["tokens codes", "rows codes", "block codes"])
@pytest.mark.parametrize(("rank", "wide"), [(13, 1536), (16, 4096), (40, 272)])
def test_both_products_at_once(module, kind, rank, wide):
    """As the kernels of one each, bit for bit again, to a gradient of any strides."""
    given = Rows(kind, wide, tokens=3000, seed=rank)
    rows, width, experts = given.routing.num_rows, -(-rank // 8) * 8, given.experts
    factor = torch.randn((experts, width, wide), device=DEVICE).to(BF16)
    narrow = torch.randn((rows, width), device=DEVICE).to(BF16)
    narrow[~given.real] = float("nan")
    v, found = poisoned((2, rows, width), BF16), poisoned((2, wide, rank, experts), torch.float32)
    wanted, parts = (poisoned(n, torch.float32) for n in ((experts, wide, rank), (1 << 24,)))
    operands, last = (given.given, given.scale, given.gathers), (0.75, current_stream(v))
    of_narrow = narrow, given.routing.row_prob, *given.where
    module.narrow_rows(*operands, factor, *given.where, v[0], *last)
    module.narrow_gradient(*operands, False, *of_narrow, True, parts, wanted, last[1])
    for out in found.permute(0, 3, 1, 2):
        module.narrow_both(*operands, factor, *of_narrow, parts, v[1], out, *last)
        assert torch.equal(*v)
    assert torch.equal(*found)
    assert float((out - wanted).norm() / wanted.norm()) < 4e-3


@pytest.mark.parametrize("kind", ["rows codes", "block codes", "transposed codes"])
def test_a_nan_among_codes_is_seen(module, kind):
    """In its row of a narrow product, and in its column of a gradient, of its expert."""
    given = Rows(kind, 272, experts=3)
    narrow = torch.randn((given.routing.num_rows, 16), device=DEVICE).to(BF16)
    own = next(own for own in given.expert_rows() if own.stop > own.start)
    row, column = own.start, 137
    (given.given.T if given.transposed else given.given)[row, column] = 0x7F
    out = poisoned((3, 272, 16), torch.float32)
    parts = poisoned((1 << 20,), torch.float32)
    module.narrow_gradient(
        *(given.given, given.scale, False, given.transposed, narrow, None, *given.where, True),
        *(parts, out, current_stream(out)),
    )
    found = torch.isnan(out)
    assert int(found.sum()) == 16 and bool(found.any(0)[column].all())
    if not given.transposed:
        factor, u = torch.randn((3, 16, 272), device=DEVICE).to(BF16), poisoned(narrow.shape, BF16)
        module.narrow_rows(
            given.given, given.scale, False, factor, *given.where, u, 1.0, current_stream(u)
        )
        assert torch.isnan(u).any(1).nonzero().flatten().tolist() == [row]
        assert bool(torch.isnan(u[row]).all())


def test_factors_are_padded_and_transposed(module):
    """Their axes may have any order in memory; in peft's the experts come last."""
    for order in itertools.permutations(range(3)):
        for shape, of_rank in (((13, 272), 0), ((272, 13), 1)):
            source = torch.randn((3, *shape), device=DEVICE)
            padded = [16 if axis == of_rank else size for axis, size in enumerate(shape)]
            straight = torch.full((3, *padded), 7.0, device=DEVICE, dtype=BF16)
            flipped = torch.full((3, *padded[::-1]), 7.0, device=DEVICE, dtype=BF16)
            given = source.permute(order).contiguous().permute([order.index(i) for i in range(3)])
            module.prepare_factor(given, straight, None, current_stream(source))
            module.prepare_factor(given, None, flipped, current_stream(source))
            wanted = torch.zeros((3, *padded), device=DEVICE, dtype=BF16)
            wanted[:, : shape[0], : shape[1]] = source.to(BF16)
            assert torch.equal(straight, wanted) and torch.equal(flipped, wanted.transpose(1, 2))
