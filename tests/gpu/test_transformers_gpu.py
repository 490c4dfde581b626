"""transformers models on a GPU engine, with adapters of peft too: FP8's error and no more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from integrations.hf_models import FAMILIES, build, errors, run

from sonicmoe.integrations.transformers import register
from sonicmoe.observe import observing

pytestmark = pytest.mark.gpu

H, I = 256, 128
FP8 = 0.12  # E4M3's 7 % on every gradient, and bf16 between the layers
BF16 = 0.04
CLAMPED = 0.18  # z whose rounding passes a clamp turns its gradient on or off; emulated, it is 0.16
both = pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture
def engines():
    """Names of the engines of all forwards and backwards."""
    found = []
    with observing(lambda event: found.append(event.call.engine)):
        yield found


def model_of(family: str) -> torch.nn.Module:
    """One MoE layer, H and I multiples of 128, bf16, on the GPU."""
    config = FAMILIES[family](1)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = H, I, I
    return build(config).to("cuda", torch.bfloat16)


@both
def test_gpt_oss(implementation: str, engines) -> None:
    """Its gate beyond the clamps, and biases."""
    model = model_of("gpt-oss")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.mul_(6.0)
    expected = run(model, "eager")
    found = errors(run(model, implementation), expected)
    in_fp8 = implementation == "sonicmoe_fp8"
    assert max(found.values()) <= (CLAMPED if in_fp8 else FP8), found
    assert in_fp8 or found["logits"] <= BF16
    assert set(engines) == {"hopper" if in_fp8 else "bf16"}


@both
def test_a_model_with_adapters_of_peft(implementation: str) -> None:
    peft = pytest.importorskip("peft", minversion="0.17")
    torch.manual_seed(3)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    options = {"target_modules": [], "init_lora_weights": False}
    config = peft.LoraConfig(r=16, target_parameters=targets, **options)
    model = peft.get_peft_model(model_of("mixtral"), config).get_base_model()
    found = errors(run(model, implementation), run(model, "eager"))
    assert len(found) == 1 + 4 and all("lora_" in name or name == "logits" for name in found)
    assert max(found.values()) <= (FP8 if implementation == "sonicmoe_fp8" else BF16), found
