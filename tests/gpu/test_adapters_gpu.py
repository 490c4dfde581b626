"""Low-rank adapters on a GPU where plain grouped GEMMs compute them, in engine `triton`; and adapters of
peft in a transformers model. `test_low_rank_gpu` has the engines for Hopper.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import fill_free_memory, waiting_is_an_error
from gpu.engine_cases import assert_same_bits, make_case
from gpu.test_low_rank_gpu import PLAIN, adapters_of, run

from sonicmoe.engine.triton import TritonEngine

pytestmark = pytest.mark.gpu

OURS = TritonEngine()


def test_bits_repeat_on_poisoned_memory_and_nothing_waits():
    case = make_case()
    adapters, routing = adapters_of(case), case.routing()
    case.routing = lambda counts=None: routing
    wanted = run(case, OURS, PLAIN, adapters)
    for byte in (0xFF, 0x7B):
        fill_free_memory(byte)
        with waiting_is_an_error():
            found = run(case, OURS, PLAIN, adapters)
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_a_model_with_adapters_of_peft(implementation):
    pytest.importorskip("transformers", minversion="5.7")
    peft = pytest.importorskip("peft", minversion="0.17")
    from gpu.test_transformers_gpu import BF16, FP8, model_of
    from integrations.hf_models import errors
    from integrations.hf_models import run as run_model

    from sonicmoe.integrations.transformers import register

    register()
    torch.manual_seed(3)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    options = {"target_modules": [], "init_lora_weights": False}
    config = peft.LoraConfig(r=16, target_parameters=targets, **options)
    model = peft.get_peft_model(model_of("mixtral"), config).get_base_model()
    found = errors(run_model(model, implementation), run_model(model, "eager"))
    assert len(found) == 1 + 4 and all("lora_" in name or name == "logits" for name in found)
    assert max(found.values()) <= (FP8 if implementation == "sonicmoe_fp8" else BF16), found
