"""The calls of PaddleFleet run here through PyTorch on the Hopper engine, on copies of weights whose BF16
memory is freed.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import waiting_is_an_error
from node.direct_layers import assert_same_bits
from oracle.case import Case
from oracle.faces import LAYERS, everywhere
from oracle.golden import scene_of
from weights.freed_memory import free, holds_memory

from sonicmoe import SonicMoEConfig
from sonicmoe.fleet import carrier
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.weight_copies import clear_all_fp8_weight_caches, quantize_native_fp8_weights
from sonicmoe.quant.reference import dequantize

pytestmark = pytest.mark.gpu


def give_copies(weights, *, iso32):
    """Quantise, and set the attributes that Fleet's experts set."""
    payload = quantize_native_fp8_weights(*weights, iso32=iso32)
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        codes, scale, *rest = payload[name]
        transposed = codes.transpose(1, 2) if payload["format"] == "iso32" else rest[0]
        weight.fp8 = (codes, scale)
        weight.transposed_fp8 = (transposed, rest[-1])


@pytest.mark.parametrize("iso32", [True, False])
def test_freed_weights(iso32):
    """The bits of weights that hold memory, and no memory for theirs; nothing waits, also where counts
    lie on the GPU, as the allgather dispatcher gives them.
    """
    case = Case.parse(
        "face=fleet arrangement=fused gradients=main_grad recipe=dx256 dtype=bfloat16 "
        "routing=sentinels counts=tensor sizes=700x512x384x6x3"
    )
    scene = scene_of(case)
    layer = LAYERS["fleet"](case, scene, "hopper")
    layer.config, layer.fleets_config = SonicMoEConfig(engine="hopper"), FP8Config()
    layer.fleets_config.iso32_weight = iso32
    counts = layer.counts(scene).to("cuda")
    layer.counts = lambda scene: counts
    x, probs, dout = (
        layer.leaf(array, dtype, True)
        for array, dtype in (
            (scene.x, torch.bfloat16), (scene.probs, torch.float32), (scene.dout, torch.bfloat16),
        )
    )  # fmt: skip
    indices = layer.tensor(scene.indices, torch.int64)

    def step():
        for weight in layer.weights:
            weight.main_grad.zero_()
        x.grad = probs.grad = None
        with everywhere(layer.config):
            out = layer.call(x, probs, indices, scene)
            out.backward(dout.detach())
        return [out.detach(), x.grad, probs.grad, *(w.main_grad for w in layer.weights)]

    wanted = [value.clone() for value in step()]
    clear_all_fp8_weight_caches()
    give_copies(layer.weights, iso32=iso32)
    free(*layer.weights)
    for _ in range(2):
        assert_same_bits(step(), wanted)
    assert all(map(torch.any, wanted)) and not any(map(holds_memory, layer.weights))
    with waiting_is_an_error():
        step()
    clear_all_fp8_weight_caches()


@pytest.mark.parametrize("options", [{"pack_scale_words": True}, {"scale_dtype": torch.int32}])
def test_the_wire_waits_for_nothing(options, monkeypatch):
    """The sender's quantiser and what the receiver makes of its words, in two of Fleet's forms."""
    monkeypatch.setattr(carrier, "_declared", None)
    carrier.declare_carrier("fp32_1x128")
    x = torch.randn(700, 512, device="cuda", dtype=torch.bfloat16)

    def there_and_back():
        codes, scale = quantize_activation_blockscaled_fast(x, **options)
        return carrier.tokens_from_carrier(codes, scale).tokens

    there_and_back()
    with waiting_is_an_error():
        found = there_and_back()
    assert float((dequantize(found) - x.float()).norm() / x.float().norm()) < 0.04
