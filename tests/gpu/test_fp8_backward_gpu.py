"""The dgated and weight-gradient GEMMs on the GPU against fp64 arithmetic on the same quantised
operands, block by block.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu.kernel_checks import (
    OF_UNIT_Z,
    added_to,
    block_errors,
    gathered,
    launched,
    poisoned,
    products,
)  # fmt: skip
from pairwise import pairwise

from sonicmoe.engine.activations import activate_backward
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.interop import current_stream
from sonicmoe.kernels.sm90 import fp8_dgated_source, fp8_wgrad_source
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import dequantize, quantize, transpose_storage
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
RECIPE = RECIPES[HOPPER.recipes[0]]
# (T, H, I, E, K): odd tile pairs, partial tiles of I (192, 384, 64), K tails (2880), one expert,
# many and empty ones
SHAPES = [
    (1000, 1024, 384, 8, 3),
    (130, 2880, 192, 3, 1),
    (129, 256, 64, 1, 1),
    (1, 128, 128, 16, 1),
    (2000, 512, 768, 64, 8),
]


@pytest.fixture(scope="module")
def wgrad():
    return fp8_wgrad_source("sm_90a").load()


def normal(generator, *size):
    return torch.randn(size, generator=generator, device="cuda")


def make_routing(shape, generator):
    tokens, _, _, experts, topk = shape
    scores = torch.rand((tokens, experts), generator=generator, device="cuda")
    scores[:, experts // 2] -= 2.0 if experts > 2 * topk else 0.0  # an expert without tokens
    probs = torch.rand((tokens, topk), generator=generator, device="cuda")
    return build_routing(scores.topk(topk, 1).indices, probs, experts)


class Backward:
    """Operands and poisoned outputs of one dgated launch."""

    def __init__(self, shape, seed=0, z=torch.int8, outlier=1.0):
        tokens, hidden, inner, experts, _ = shape
        generator = torch.Generator("cuda").manual_seed(seed)
        self.routing = make_routing(shape, generator)
        r = self.rows = self.routing.num_rows
        self.used = int(self.routing.padded_offsets[-1])
        self.dout = quantize(normal(generator, tokens, hidden), rows(128))
        # native w2 [E, H, I]; dgrad reads it as [E, I, H]
        self.w2 = quantize(normal(generator, experts, inner, hidden) * hidden**-0.5, RECIPE.w2)
        values = normal(generator, r, 2 * inner) * (self.routing.row_token >= 0).unsqueeze(1)
        values[::3, 5] *= outlier  # of every third row, so that a warp meets both codes
        q = quantize(values, rows(128), Code.ADAPTIVE)
        assert outlier == 1.0 or bool((q.scale_inv[:, 0] < 0).any())
        self.z, self.z_scale = q.codes if z is torch.int8 else values.to(z), q.scale_inv
        self.z_values = dequantize(q) if z is torch.int8 else self.z
        self.dz, self.dz_t = (
            poisoned((r, 2 * inner), torch.uint8),
            poisoned((2 * inner, r), torch.uint8),
        )
        self.y1s_t = poisoned((inner, r), torch.uint8)
        self.dz_scale = poisoned((r // 128, -(-inner // 128)), torch.float32)
        dz_t_blocks = -(-2 * inner // RECIPE.wgrad_dz.cols)
        self.dz_t_scale = poisoned((dz_t_blocks, r // 128), torch.float32)
        self.y1s_t_scale = poisoned((-(-inner // 128), r // 128), torch.float32)
        self.parts = poisoned((-(-inner // 256), r), torch.float32)

    def run(self, launch, activation=(0, 0.0, 0.0), wide=None):
        dz_t, y1s_t = wide or (self.dz_t, self.y1s_t)
        routing = self.routing
        launch(
            self.dout.codes, self.dout.scale_inv, self.w2.codes, self.w2.scale_inv, None, None, routing.row_token, routing.row_prob,
            routing.padded_offsets, self.z, self.z_scale, self.dz, self.dz_scale, self.parts,
            dz_t, self.dz_t_scale, y1s_t, self.y1s_t_scale, wide is not None,
            *activation, 0, current_stream(self.dz),
        )  # fmt: skip

    def golden(self, activation):
        """fp64 `(dz, y1s, dprob)` of the used rows."""
        routing, used = self.routing, self.used
        dy1 = products(gathered(self.dout, routing), self.w2, routing)
        z, own = self.z_values[:used].double(), OF_UNIT_Z.get(activation, ())
        prob = routing.row_prob[:used].double().unsqueeze(1)
        y1, dz = activate_backward(z, dy1 * prob, activation, own)
        return dz, y1 * prob, (dy1 * y1).sum(1)

    def outputs(self):
        """The block-scaled outputs as dequantised `[used, features]` matrices."""
        dz = BlockScaledTensor(self.dz.view(E4M3), self.dz_scale, RECIPE.dz, Code.E4M3)
        stored = (
            (self.dz_t, self.dz_t_scale, RECIPE.wgrad_dz),
            (self.y1s_t, self.y1s_t_scale, RECIPE.wgrad_y1s),
        )
        transposed = [
            BlockScaledTensor(c.view(E4M3), s, block, Code.E4M3, Orientation.COLUMNS)
            for c, s, block in stored
        ]
        return [dequantize(q)[: self.used] for q in (dz, *transposed)]


def check_quantised(name, got, wanted):
    """The codes of exact values are the yardstick: rounding to bf16 on the way, or a sum a little
    off, moves few of them. In a block with a row or two those few are a larger part.
    """
    block = getattr(RECIPE, f"wgrad_{name}")
    yardstick = block_errors(dequantize(quantize(wanted.float(), block)), wanted)
    errors = block_errors(got, wanted)
    rows_with_values = (wanted != 0).any(1).reshape(-1, 128).sum(1)
    allowed = torch.where(rows_with_values > 8, 1.03, 1.1)
    assert bool((errors <= allowed * yardstick + 1e-4).all()), (name, errors / yardstick)


def check_outputs(case, dz, y1s):
    """Codes of the used rows against exact values; what no expert owns is not written."""
    got_dz, got_dz_t, got_y1s = case.outputs()
    check_quantised("dz", got_dz, dz)
    check_quantised("dz", got_dz_t, dz)
    check_quantised("y1s", got_y1s, y1s)
    padding = case.routing.row_token[: case.used] < 0
    for name, got in (("dz", got_dz), ("dz_t", got_dz_t), ("y1s", got_y1s)):
        assert bool((got[padding] == 0).all()), name
    for codes in (case.dz[case.used :], case.dz_t[:, case.used :]):
        assert bool((codes == 0x7F).all())
    return got_dz, got_dz_t


@pytest.mark.parametrize(
    ("activation", "z", "shape", "outlier"),
    [
        *pairwise(HOPPER.activations, [torch.int8], SHAPES, [1.0, 20.0]),
        *pairwise([ActivationType.SWIGLU], [torch.bfloat16], SHAPES, [1.0]),
    ],
    ids=lambda v: getattr(v, "value", str(v)),
)
def test_dgated(shape, activation, z, outlier):
    code = ZCode.ADAPTIVE if z is torch.int8 else ZCode.BF16
    case = Backward(shape, seed=10, z=z, outlier=outlier)
    module = fp8_dgated_source("sm_90a", activation, code).load()
    number = launched(activation, module)
    case.run(module.gather_dgated_gemm, number)
    dz, y1s, dprob = case.golden(activation)
    got_dz, got_dz_t = check_outputs(case, dz, y1s)
    assert torch.equal(got_dz, got_dz_t), "the two orders of dz hold other codes"
    got_dprob = case.parts.double().sum(0)[: case.used]
    # the tensor cores keep 14 bits of an FP8 sum
    assert float((got_dprob - dprob).norm() / dprob.norm().clamp(min=1e-30)) < 3e-3
    assert bool((got_dprob[case.routing.row_token[: case.used] < 0] == 0).all())
    # Operands of wgrad that are not quantised.
    wide = tuple(poisoned((case.rows, n), torch.bfloat16) for n in (2 * shape[2], shape[2]))
    case.dz_t.fill_(0x7F)
    case.run(module.gather_dgated_gemm, number, wide=wide)
    for got, wanted in zip(wide, (dz, y1s), strict=True):
        # A value is rounded to bf16 by up to 2^-9 of it, and a block of one row averages few.
        assert float(block_errors(got[: case.used], wanted).max()) < 4e-3
    assert bool((case.dz_t == 0x7F).all())


def wgrad_operands(shape, seed=0, spread=0.0):
    """`(a [R, M], b [R, N])` in the blocks of dout and of dz, which are up to 2^spread apart, zero in padding
    rows, and the routing.
    """
    _, hidden, inner, _, _ = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    routing = make_routing(shape, generator)
    real = (routing.row_token >= 0).unsqueeze(1)
    octaves = torch.rand((routing.num_rows // 128, 1), generator=generator, device="cuda") - 0.5
    growth = torch.exp2(spread * octaves).repeat_interleave(128, 0)
    a, b = (
        torch.where(real, normal(generator, routing.num_rows, n) * growth, 0.0)
        for n in (hidden, 2 * inner)
    )
    return quantize(a, RECIPE.wgrad_dout), quantize(b, RECIPE.wgrad_dz), routing


def run_wgrad(module, a, b, routing, accumulator):
    operands = [of for q in map(transpose_storage, (a, b)) for of in (q.codes, q.scale_inv)]
    to = routing.padded_offsets, added_to(module, accumulator)
    module.grouped_wgrad(*operands, *to, 0, current_stream(accumulator))


def golden_wgrad(a, b, routing, base):
    left, right, result = dequantize(a).double(), dequantize(b).double(), base.double().clone()
    for e, (first, last) in enumerate(itertools.pairwise(routing.padded_offsets.tolist())):
        result[e] += left[first:last].T @ right[first:last]
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wgrad(wgrad, shape):
    a, b, routing = wgrad_operands(shape, spread=24.0)
    base = torch.randn((shape[3], a.shape[1], b.shape[1]), device="cuda")
    accumulator = base.clone()
    run_wgrad(wgrad, a, b, routing, accumulator)
    wanted = golden_wgrad(a, b, routing, base)
    for e in range(shape[3]):
        added = wanted[e] - base[e].double()
        if not bool(added.any()):
            assert torch.equal(accumulator[e], base[e]), "an expert without tokens was touched"
        else:
            # the tensor cores keep 14 bits of an FP8 sum, and fp32 keeps 24 of the total
            error = (accumulator[e].double() - wanted[e]).norm() / added.norm()
            assert float(error) < 2e-3 + 1e-6 * float(base[e].norm() / added.norm()), e


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-9])
def test_wgrad_of_blocks_of_zeros(wgrad, size):
    """Tokens that are masked out, or whose probability is 0, leave blocks of zeros, whose scales
    multiply to less than fp32 has.
    """
    a, b, routing = wgrad_operands((2048, 256, 128, 2, 2), seed=8)
    left, right = dequantize(a) * size, dequantize(b) * size
    for zero_left, zero_right in (
        ((0, 256), (0, 256)),
        ((0, 256), ()),
        ((), (128, 512)),
        ((512, 768), (640, 1024)),
        ((0, 4096), (0, 4096)),
    ):
        for values, rows_of in ((x := left.clone(), zero_left), (y := right.clone(), zero_right)):
            if rows_of:
                values[slice(*rows_of)] = 0
        q, r = quantize(x, RECIPE.wgrad_dout), quantize(y, RECIPE.wgrad_dz)
        base = torch.zeros((2, x.shape[1], y.shape[1]), device="cuda")
        accumulator = base.clone()
        run_wgrad(wgrad, q, r, routing, accumulator)
        wanted = golden_wgrad(q, r, routing, base)
        error = (accumulator.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert float(error) < 2e-3, (zero_left, zero_right)
