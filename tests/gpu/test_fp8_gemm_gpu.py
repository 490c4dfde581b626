"""The FP8 grouped GEMM on the GPU against fp64 products of the same quantised operands, per expert
and per 128-row block.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu.kernel_checks import OF_UNIT_Z, block_errors, gathered, launched, poisoned, products
from pairwise import pairwise

from sonicmoe.engine.activations import activate
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.reference_operands import saved_z
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ACTIVATIONS, ActivationType, ZCode
from sonicmoe.interop import current_stream
from sonicmoe.kernels.sm90 import fp8_grouped_gemm_source
from sonicmoe.quant.format import BlockScaledTensor, Code
from sonicmoe.quant.recipes import RECIPES, BlockShape, iso, rows
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
RECIPE = RECIPES[HOPPER.recipes[0]]
# relative RMSE of rounding to bf16 is 1.7e-3; the rest is the tensor cores' accumulation
BF16_ROUNDING = 2.5e-3
# (T, H, I, E, K): counts around the tile, odd tile pairs, a K tail (2880), scales not in fours
# (768, 384), one expert, many, an odd number of 128 in N1 (384, 128)
SHAPES = [
    (300, 384, 192, 4, 2),
    (200, 256, 64, 3, 2),
    (130, 2880, 768, 3, 1),
    (2000, 1024, 384, 64, 8),
    (129, 256, 128, 1, 1),
    (1, 128, 128, 16, 1),
]


def module_for(activation, z=ZCode.ADAPTIVE):
    return fp8_grouped_gemm_source("sm_90a", activation, z).load()


@pytest.fixture(scope="module")
def module():
    return module_for(ActivationType.SWIGLU)


def make_case(shape, seed=0, spread=0.0, outlier=1.0):
    """Tokens, native w1 and w2, routing; `spread` octaves of random scale per token and 128
    channels; an up row and, in the next block, a gate row of every w1 times `outlier`.
    """
    tokens, hidden, intermediate, experts, topk = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, device="cuda")

    x = normal(tokens, hidden)
    if spread:
        blocks = torch.rand((tokens, -(-hidden // 128)), generator=generator, device="cuda") - 0.5
        x = x * torch.exp2(spread * blocks).repeat_interleave(128, 1)[:, :hidden]
    scores = torch.rand((tokens, experts), generator=generator, device="cuda")
    indices = scores.topk(topk, 1).indices
    probs = torch.rand((tokens, topk), generator=generator, device="cuda")
    w1, w2 = (
        normal(experts, 2 * intermediate, hidden) * hidden**-0.5,
        normal(experts, hidden, intermediate) * intermediate**-0.5,
    )
    w1[:, 7] *= outlier
    w1[:, 138:139] *= outlier
    return x, w1, w2, build_routing(indices, probs, experts)


def up_projection(
    module, x, w1, routing, activation=(0, 0.0, 0.0), store_z=True, z_dtype=torch.int8
):  # fmt: skip
    """`(z, y1)` as block-scaled tensors; z in bf16 is a plain one."""
    r, n = routing.num_rows, w1.shape[1]
    z, y1 = poisoned((r, n), z_dtype), poisoned((r, n // 2), torch.uint8).view(E4M3)
    z_scale, y1_scale = (
        poisoned((r, n // 128), torch.float32),
        poisoned((r, -(-n // 256)), torch.float32),
    )
    module.gather_gated_gemm(
        x.codes, x.scale_inv, w1.codes, w1.scale_inv, None, None, None, routing.row_token, routing.padded_offsets, z, z_scale,
        y1, y1_scale, *activation, store_z, 0, current_stream(z),
    )  # fmt: skip
    kept = BlockScaledTensor(z, z_scale, rows(128), Code.ADAPTIVE) if z_dtype is torch.int8 else z
    return kept, BlockScaledTensor(y1, y1_scale, rows(128), Code.E4M3)


def grouped(module, a, w, routing):
    out = poisoned((a.shape[0], w.shape[1]), torch.bfloat16)
    module.grouped_gemm(
        a.codes, a.scale_inv, w.codes, w.scale_inv, None, None, None, routing.padded_offsets, out, 0, current_stream(out),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("shape", "activation", "outlier"),
    pairwise(SHAPES, HOPPER.activations, (1.0, 100.0)),
    ids=lambda v: getattr(v, "value", str(v)),
)
def test_up_projection(shape, activation, outlier):
    """Beside an outlier the codes of z are E4M3."""
    module = module_for(activation)
    x, w1, _, routing = make_case(shape, outlier=outlier)
    xq, wq = quantize(x, rows(128)), quantize(w1, RECIPE.w1)
    z, y1 = up_projection(module, xq, wq, routing, launched(activation, module))
    wanted_z = products(gathered(xq, routing), wq, routing)
    own = OF_UNIT_Z.get(activation, ())
    wanted_y1 = activate(wanted_z, activation, own)
    used = wanted_z.shape[0]
    padding = routing.row_token[:used] < 0
    wide = (z.scale_inv[:used][~padding] < 0).float().mean(0)
    assert float(wide[:2].min()) > 0.9 if outlier > 1 else float(wide.mean()) < 0.02
    # The codes of exact values are the yardstick: the kernel may be one code off where its sum is a
    # little off.
    settings = EngineSettings(activation, RECIPE, activation_parameters=own)
    for name, got, wanted, best in (
        ("z", z, wanted_z, saved_z(wanted_z.float(), settings, torch.bfloat16)),
        ("y1", y1, wanted_y1, quantize(wanted_y1.float(), rows(128))),
    ):
        exact = block_errors(dequantize(best), wanted)
        found = dequantize(got)[:used]
        errors = block_errors(found, wanted)
        # A large value's sum is off by more than its neighbours' codes are.
        sums = 1e-4 if outlier == 1.0 else 2e-3
        assert bool((errors <= 1.03 * exact + sums).all()), (name, float(errors.max()))
        assert bool((found[padding] == 0).all()), name
        if name == "z" and ACTIVATIONS[activation].clamps:
            # But for sums that are a little off, a kept value lies on its side of the bound.
            limit = ACTIVATIONS[activation].values(own)["limit"]
            flips = (found[:, ::2] > limit) != (wanted[:, ::2] > limit)
            assert float(flips.float().mean()) < 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_z_in_bf16_and_without(shape, activation=ActivationType.SWIGLU):
    """The rows of experts and no others are written."""
    x, w1, _, routing = make_case(shape)
    xq, wq = quantize(x, rows(128)), quantize(w1, RECIPE.w1)
    in_codes, module = module_for(activation), module_for(activation, ZCode.BF16)
    number = launched(activation, module)
    _, y1 = up_projection(in_codes, xq, wq, routing, launched(activation, in_codes))
    wanted = products(gathered(xq, routing), wq, routing)
    used = len(wanted)
    launch = partial(up_projection, module, xq, wq, routing, number)
    z, y1_beside = launch(z_dtype=torch.bfloat16)
    assert float(block_errors(z[:used], wanted).max()) <= BF16_ROUNDING
    assert bool((z[:used][routing.row_token[:used] < 0] == 0).all())
    assert bool(torch.isnan(z[used:]).all()), "rows that no expert owns were written"
    without, y1_alone = launch(z_dtype=torch.bfloat16, store_z=False)
    assert bool(torch.isnan(without).all())
    assert torch.equal(y1_beside.bytes[:used], y1_alone.bytes[:used])
    assert torch.equal(y1_beside.scale_inv[:used], y1_alone.scale_inv[:used])
    # The same y1 as beside INT8, but for the rounding of one product.
    assert float((y1.bytes[:used] != y1_beside.bytes[:used]).float().mean()) < 1e-3
    with pytest.raises(Exception, match="z must have 16-bit elements"):
        launch()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_gemm(module, shape):
    """Down-projection and dgrad: A in expert order through the copy engine, any N, scales for 128
    or 256 of K.
    """
    _, w1, w2, routing = make_case(shape, seed=1)
    w1 = w1.transpose(1, 2).contiguous()
    for weight, of_a, of_w in (
        (w2, rows(128), RECIPE.w2),
        (w1, rows(128), iso(128)),
        (w1, RECIPE.dz, RECIPE.w1_dgrad.transposed),
        (w1, rows(256), BlockShape(128, 256)),
    ):
        values = torch.randn((routing.num_rows, weight.shape[2]), device="cuda")
        # Neighbouring scales that differ show which of them a k-block is given.
        values *= torch.exp2(torch.arange(weight.shape[2], device="cuda") // 128 % 5 * 2.0)
        a, w = quantize(values, of_a), quantize(weight, of_w)
        out, wanted = grouped(module, a, w, routing), products(dequantize(a), w, routing)
        assert float(block_errors(out[: wanted.shape[0]], wanted).max()) <= BF16_ROUNDING
        assert bool(torch.isnan(out[wanted.shape[0] :]).all()), (
            "rows that no expert owns were written"
        )


def test_scales_that_differ_wildly(module):
    """Blocks of zeros, and blocks 2^40 apart, overflow nothing and lose nothing, even where the
    largest meets zero weights.
    """
    x, w1, _, routing = make_case((700, 1024, 256, 4, 2), seed=3, spread=40.0)
    x[:, 128:384] = 0
    x[::3, 512:] = 0
    w1[:, :, 640:768] = 0
    xq, wq = quantize(x, rows(128)), quantize(w1, RECIPE.w1)
    values = gathered(xq, routing)
    wanted = products(values, wq, routing)
    z, _ = up_projection(module, xq, wq, routing)
    got = dequantize(z)[: wanted.shape[0]].double()
    assert bool(torch.isfinite(got).all())
    error = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-300)
    assert float(error[routing.row_token[: wanted.shape[0]] >= 0].max()) < 0.05
