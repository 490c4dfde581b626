"""What PaddleFleet calls, through PyTorch on the Hopper engine: its whole flow, with tokens and gradients
in FP8, weight gradients straight into `main_grad`, and weights whose BF16 memory is freed.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from gpu.device import waiting_is_an_error
from gpu.engine_cases import make_case

from sonicmoe import SonicMoEConfig
from sonicmoe.fleet import carrier
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_copies import clear_all_fp8_weight_caches, quantize_native_fp8_weights
from sonicmoe.fleet.weight_layout import fused_sonic_w1_to_grouped, fused_transpose_w2_layout
from sonicmoe.quant.reference import dequantize

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def undeclared(monkeypatch):
    monkeypatch.setattr(carrier, "_declared", None)


@pytest.fixture
def case():
    """With sentinels, and an expert without tokens."""
    return make_case(700, hidden=512, intermediate=384, experts=6, topk=3, empty=(4,))


@pytest.fixture
def weights(case):
    """`weight1 [E, H, 2I]` and `weight2 [E, I, H]` with `main_grad` of zeros."""
    w1, w2, *_ = case.weights
    made = fused_sonic_w1_to_grouped(w1), fused_transpose_w2_layout(w2)
    held = [torch.nn.Parameter(weight.clone()) for weight in made]
    for weight in held:
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    return held


def call_fleet(weights, case, config, counts):
    """`run_sonic_moe` as Fleet's experts call it behind an FP8 dispatch: e4m3 tokens with packed
    words, and the handle that the combine's backward has filled with bytes. PyTorch has no gradient
    of e4m3 tensors.
    """
    hidden, handle = int(case.x.shape[1]), {}
    codes, words = quantize_activation_blockscaled_fast(case.x, pack_scale_words=True)
    probs = case.probs.clone().requires_grad_()
    with SonicMoEConfig(engine="hopper").activate():
        out = run_sonic_moe(
            *(codes, case.indices, probs, int(case.indices.shape[1]), case.num_experts, *weights),
            fp8=True, tokens_per_expert=counts, fp8_scale=words, fp8_combine_grad_handle=handle, fp8_config=config,
        )  # fmt: skip
        dout, words = quantize_activation_blockscaled_fast(case.dout, pack_scale_words=True)
        handle["data"], handle["scale"] = dout, words.view(torch.uint8).reshape(-1, hidden // 32)
        # What autograd carries is a placeholder, which nobody reads.
        out.backward(torch.full_like(out, float("nan")))
    assert not handle, "a handle is emptied by the backward that reads it"
    return [out.detach(), probs.grad, *(weight.main_grad for weight in weights)]


def give_copies(weights, *, iso32):
    """Quantise, and set the attributes that Fleet's experts set."""
    payload = quantize_native_fp8_weights(*weights, iso32=iso32)
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        codes, scale, *rest = payload[name]
        transposed = codes.transpose(1, 2) if payload["format"] == "iso32" else rest[0]
        weight.fp8 = (codes, scale)
        weight.transposed_fp8 = (transposed, rest[-1])


def take_copies(weights):
    """Drop the copies, which Fleet does before the optimizer."""
    clear_all_fp8_weight_caches()
    for weight in weights:
        weight.fp8 = weight.transposed_fp8 = None


@contextmanager
def freed(weights):
    """Inside, the parameters keep their shapes and hold no memory, as in a step of Fleet's."""
    held = [weight.detach().to("cpu", copy=True) for weight in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for weight, values in zip(weights, held, strict=True):
            weight.untyped_storage().resize_(values.untyped_storage().nbytes())
            with torch.no_grad():
                weight.data.copy_(values)


@pytest.mark.parametrize("iso32", [True, False])
def test_freed_weights(case, weights, iso32):
    """The bits of weights that hold memory, and no memory for theirs; nothing waits, also where counts
    lie on the GPU, as the allgather dispatcher gives them.
    """
    config, counts = FP8Config(), torch.tensor(case.counts, dtype=torch.int32, device="cuda")
    config.iso32_weight = iso32
    wanted = [value.clone() for value in call_fleet(weights, case, config, counts)]
    take_copies(weights)
    give_copies(weights, iso32=iso32)
    with freed(weights):
        assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
        for _ in range(2):
            for weight in weights:
                weight.main_grad.zero_()
            found = call_fleet(weights, case, config, counts)
            assert all(map(torch.equal, found, wanted)) and all(map(torch.any, found))
        with waiting_is_an_error():
            call_fleet(weights, case, config, counts)
    take_copies(weights)


@pytest.mark.parametrize("form", ["packed", "one byte a word"])
def test_the_wire_waits_for_nothing(case, form):
    """The sender's quantiser and what the receiver makes of its words, in two of Fleet's forms."""
    carrier.declare_carrier("fp32_1x128")
    options = {"pack_scale_words": True}
    if form == "one byte a word":
        options = {"scale_dtype": torch.int32}

    def there_and_back():
        codes, scale = quantize_activation_blockscaled_fast(case.x, **options)
        return carrier.tokens_from_carrier(codes, scale).tokens

    there_and_back()
    with waiting_is_an_error():
        found = there_and_back()
    assert float((dequantize(found) - case.x.float()).norm() / case.x.float().norm()) < 0.04
