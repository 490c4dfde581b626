"""What PaddleFleet calls, through PyTorch on the GPU engines: `run_sonic_moe` waits for nothing; its
whole flow, with tokens and gradients in FP8, weight gradients straight into
`main_grad`, and weights whose BF16 memory is freed.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import waiting_is_an_error
from gpu.engine_cases import make_case
from gpu.fleet_layer import (
    Batch,
    Sizes,
    call_fleet,
    freed,
    give_copies,
    relative,
    take_copies,
    weights_of,
)

from sonicmoe.fleet import carrier
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.layer import layer_of
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_layout import (
    fused_sonic_w1_to_grouped,
    fused_transpose_w2_layout,
)
from sonicmoe.quant.reference import dequantize
from sonicmoe.weights.stacked import GROUPED

pytestmark = pytest.mark.gpu
SIZES = Sizes(tokens=700, hidden=512, intermediate=384, experts=6, topk=3)
each_layout = pytest.mark.parametrize("layout", ["sonic", "grouped"])
each_precision = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


@pytest.fixture(autouse=True)
def undeclared(monkeypatch):
    monkeypatch.setattr(carrier, "_declared", None)


# ---- run_sonic_moe beside the node ----


@pytest.fixture(scope="module")
def case():
    """With the sizes of `SIZES`, and an expert without tokens."""
    return make_case(700, hidden=512, intermediate=384, experts=6, topk=3, empty=(4,))


class Fleet:
    """Two parameters; `w2.main_grad` is grouped in either layout."""

    def __init__(self, case, layout, fp8):
        self.case, self.fp8, self.config = case, fp8, FP8Config()
        made = case.weights[:2]
        grouped = fused_sonic_w1_to_grouped(made[0]), fused_transpose_w2_layout(made[1])
        made = made if layout == "sonic" else grouped
        self.weights = [torch.nn.Parameter(weight.clone()) for weight in made]
        self.weights[0].main_grad = torch.zeros(made[0].shape, device="cuda")
        self.weights[1].main_grad = torch.zeros(grouped[1].shape, device="cuda")
        self.sonic = layout == "sonic"

    @property
    def state(self):
        return layer_of(*self.weights, SIZES.hidden).state

    def call(self, counts=None):
        x, scores = (t.clone().requires_grad_() for t in (self.case.x, self.case.probs))
        ids = self.case.indices.to(torch.int32)
        arguments = (x, ids, scores, SIZES.topk, SIZES.experts, *self.weights, self.fp8, counts)
        out = run_sonic_moe(*arguments, fp8_config=self.config)
        out.backward(self.case.dout)
        return out, x.grad, scores.grad

    def gradients(self):
        """In Sonic's layout."""
        dw1, dw2 = (weight.main_grad for weight in self.weights)
        if not self.sonic:
            dw1 = GROUPED.native_w1(dw1)
        return dw1, dw2.transpose(1, 2)


@each_precision
@each_layout
def test_nothing_waits_for_the_device(case, layout, fp8):
    """Counts are a tensor on the GPU, as the allgather dispatcher gives them."""
    fleet = Fleet(case, layout, fp8)
    counts = torch.tensor(case.counts, dtype=torch.int32, device="cuda")
    fleet.call(counts)
    with waiting_is_an_error():
        for again in (False, True, False):
            fleet.config.recompute_z = again
            fleet.call(counts)


# ---- the whole flow ----


@pytest.fixture
def batch():
    return Batch.random(SIZES, "cuda")


@pytest.fixture
def weights():
    return weights_of(SIZES, "cuda")


@pytest.mark.parametrize("iso32", [True, False])
def test_freed_weights(batch, weights, iso32):
    """The bits of weights that hold memory, and no memory for theirs; nothing waits."""
    config = FP8Config()
    config.iso32_weight = iso32
    before = call_fleet(weights, batch, "hopper", config)
    held = {name: value.clone() for name, value in before.items()}
    take_copies(weights)
    give_copies(weights, iso32=iso32)
    with freed(weights):
        assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
        for _ in range(2):
            for weight in weights:
                weight.main_grad.zero_()
            found = call_fleet(weights, batch, "hopper", config)
            for key, wanted in held.items():
                assert torch.equal(found[key], wanted), key
        with waiting_is_an_error():
            found = call_fleet(weights, batch, "hopper", config)
    assert bool(found["dw1"].any())
    take_copies(weights)


@pytest.mark.parametrize("form", ["packed", "one byte a word"])
def test_the_wire_waits_for_nothing(batch, form):
    """The sender's quantiser and what the receiver makes of its words, in two of Fleet's forms."""
    carrier.declare_carrier("fp32_1x128")
    options = {"pack_scale_words": True}
    if form == "one byte a word":
        options = {"scale_dtype": torch.int32}

    def there_and_back():
        codes, scale = quantize_activation_blockscaled_fast(batch.x, **options)
        return carrier.tokens_from_carrier(codes, scale).tokens

    there_and_back()
    with waiting_is_an_error():
        found = there_and_back()
    assert relative(dequantize(found), batch.x) < 0.04
