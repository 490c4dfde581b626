"""Experts frozen as FP8 codes alone: what they hold and compute, beside the same model in bf16."""

from __future__ import annotations

import copy
import gc
import json
import logging
import types
import weakref

import pytest
import torch
from integrations.hf_models import FAMILIES, build, relative_rmse, text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from sonicmoe.errors import ConfigError, LayoutError
from sonicmoe.integrations.frozen import (
    empty_codes,
    freeze_experts,
    freezing_experts,
    frozen_bytes,
    load_frozen,
    thaw_experts,
)
from sonicmoe.integrations.transformers import check_model
from sonicmoe.layouts import NATIVE
from sonicmoe.weights.frozen import from_codes, to_codes

peft = pytest.importorskip("peft", minversion="0.17")
pytestmark = pytest.mark.usefixtures("registered")
THREE = pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CODES = ("gate_up_proj", "down_proj")
KIND = {"dtype": torch.bfloat16, "attn_implementation": "eager"}


def model_of(family: str, layers: int = 1, **sizes) -> torch.nn.Module:
    """In bf16; a cast of a model would also cast what transformers keeps in fp32."""
    config = FAMILIES[family](layers)
    for name, size in sizes.items():
        setattr(config, name, size)
    model = build(config, "sonicmoe_fp8")
    made = AutoModelForCausalLM.from_config(
        model.config, experts_implementation="sonicmoe_fp8", **KIND
    )
    made.load_state_dict(model.state_dict())
    return made.train()


def frozen_from(directory):
    """A checkpoint whose experts are frozen while it is loaded, and what that lost."""
    with freezing_experts() as loaded:
        model = AutoModelForCausalLM.from_pretrained(
            directory, experts_implementation="sonicmoe_fp8", **KIND
        )
    return model.train(), loaded


def experts_of(model):
    return next(module for module in model.modules() if hasattr(module, "gate_up_proj"))


def adapted(model, **options):
    """With factors that are not zeros, equal for equal models."""
    torch.manual_seed(3)
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["o_proj"], "init_lora_weights": False}
    given |= {"target_parameters": EXPERTS, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def step(model, seed=1):
    """The loss, and the gradients of all that trains."""
    ids = text(seed=seed)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def freed(model):
    """Frozen, and nothing of the bf16 weights is left."""
    watched = [weakref.ref(getattr(experts_of(model), name)) for name in CODES]
    rounding = freeze_experts(model)
    assert all(reference() is None for reference in watched)
    return rounding


@THREE
def test_a_weight_takes_a_byte_until_it_is_thawed(family):
    model = model_of(family)
    before = {name: getattr(experts_of(model), name).detach().clone() for name in CODES}
    weights = sum(weight.numel() for weight in before.values())
    rounding = freed(model)
    assert rounding.weights == weights and 0.02 < rounding.error < 0.03
    held = {n: t for n, t in experts_of(model).named_parameters() if "bias" not in n}
    assert sum(t.numel() * t.element_size() for t in held.values()) == frozen_bytes(model)
    scales = sum(t.numel() for name, t in held.items() if "_scale" in name)
    assert frozen_bytes(model) == weights + 4 * scales
    assert freeze_experts(model).weights == 0  # frozen already
    check_model(model)
    found = step(model)[0]
    thaw_experts(model)
    for name, weight in before.items():
        thawed = getattr(experts_of(model), name)
        assert thawed.dtype == torch.bfloat16 and thawed.shape == weight.shape
        assert 0 < relative_rmse(thawed, weight) < 0.03
    assert abs(step(model)[0] - found) < 2e-3 * found
    assert not any("scale" in key for key in model.state_dict())


def test_an_experts_codes_depend_on_no_other():
    """An expert that codes hold exactly stays exact among others that they do not, and ranks that have
    some of the experts make the codes of one that has all.
    """
    weight = torch.randn(6, 80, 64).bfloat16()
    weight[2] = (8 * weight[2]).clamp(-7, 7).round() / 8
    codes, _ = to_codes(weight, NATIVE, 0)
    assert torch.equal(from_codes(codes, NATIVE, 0)[2], weight[2])
    for expert in range(6):
        own, _ = to_codes(weight[expert : expert + 1], NATIVE, 0)
        assert all(map(torch.equal, own, [part[expert : expert + 1] for part in codes]))


@THREE
def test_lora_trains_beside_codes(family):
    model = model_of(family)
    plain = adapted(copy.deepcopy(model))
    freed(model)
    loss, gradients = step(adapted(model))
    wanted_loss, wanted = step(plain)
    assert abs(loss - wanted_loss) < 2e-3 * wanted_loss
    factors = [name for name in wanted if "experts" in name and "lora_" in name]
    assert len(factors) == 4
    exact_model = plain.float()
    exact_model.set_experts_implementation("sonicmoe")
    _, exact = step(exact_model)
    for name in factors:  # no further from exact ones than those of weights in bf16 and their codes
        error, of_plain = [relative_rmse(each[name], exact[name]) for each in (gradients, wanted)]
        assert error < 1.2 * of_plain, name


@THREE
def test_saved_loaded_copied_cast(family, tmp_path):
    model = model_of(family)
    freed(model)
    wanted = step(model)[0]
    state = model.state_dict()
    named = [key for key in state if key.endswith("_e4m3")]
    assert len(named) == 2 and all(state[key].dtype == torch.float8_e4m3fn for key in named)
    assert all(state[key.replace("_e4m3", "_scale_inv")].dtype == torch.float32 for key in named)
    assert not any(key.endswith(CODES) for key in state)
    model.save_pretrained(tmp_path)
    loaded = load_frozen(tmp_path, **KIND).train()
    other = copy.deepcopy(model)
    empty_codes(other)
    assert step(other)[0] != wanted
    other.load_state_dict(state)
    for each in (loaded, other, copy.deepcopy(model)):
        assert step(each)[0] == wanted
    # A cast leaves codes and scales alone.
    cast = model.state_dict() if model.to("cpu").half() is model else {}
    for key in [key for key in state if key.endswith(("_e4m3", "_inv"))]:
        assert torch.equal(*[each[key].view(torch.uint8) for each in (cast, state)])


@THREE
def test_adapters_merge_into_codes(family, caplog):
    model = model_of(family)
    plain = adapted(copy.deepcopy(model))
    freed(model)
    model = adapted(model)
    with caplog.at_level(logging.INFO, "sonicmoe"):
        merged = model.merge_and_unload()
    assert sum("merge of adapters into frozen codes" in line for line in caplog.messages) == 2
    assert experts_of(merged).down_proj.dtype == torch.uint8
    wanted = plain.merge_and_unload()
    thaw_experts(merged)
    for name in CODES:
        found = [getattr(experts_of(each), name).float() for each in (merged, wanted)]
        assert relative_rmse(*found) < 0.045, name


def test_refusals():
    model = model_of("qwen3-moe")
    experts = experts_of(model)
    with pytest.raises(LayoutError, match="has no experts"):
        freeze_experts(torch.nn.Linear(2, 2))
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    freeze_experts(model)
    with pytest.raises(RuntimeError, match=r"proj is torch\.bfloat16, and the weight is frozen"):
        model.load_state_dict(plain)
    with pytest.raises(RuntimeError, match="floating"):
        experts.down_proj.requires_grad_(True)
    with pytest.raises(LayoutError, match=r"parametrized, and was frozen .* rank 128 or less"):
        step(adapted(copy.deepcopy(model), r=130))
    model.set_experts_implementation("sonicmoe")
    for call in (lambda: step(model), lambda: check_model(model)):
        with pytest.raises(ConfigError, match="frozen as FP8 codes"):
            call()
    model.set_experts_implementation("sonicmoe_fp8")
    experts.down_proj = torch.nn.Parameter(
        torch.zeros_like(experts.down_proj, dtype=torch.bfloat16)
    )
    with pytest.raises(LayoutError, match=r"down_proj of .* was frozen"):
        step(model)


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_frozen():
    model = model_of("qwen3-moe", layers=2)
    before = step(model)[0]
    weight = model.model.layers[1].mlp.experts.down_proj
    for bad in (float("nan"), float("-inf")):
        held = weight.data[1, 2, 3].clone()
        weight.data[1, 2, 3] = bad
        with pytest.raises(
            LayoutError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj is not finite"
        ):
            freeze_experts(model)
        weight.data[1, 2, 3] = held
        assert step(model)[0] == before and frozen_bytes(model) == 0


def bf16_weights():
    """The weights of experts that live in this process now. The caller holds them, so that no later weight
    is taken for one of them.
    """
    alive = [t for t in gc.get_objects() if type(t) is torch.nn.Parameter and t.ndim == 3]
    return {t for t in alive if t.dtype == torch.bfloat16 and not t.is_meta}


@THREE
def test_loads_a_bf16_checkpoint_weight_by_weight(family, tmp_path, monkeypatch):
    from sonicmoe.functional import frozen

    model = model_of(family, layers=3)
    model.save_pretrained(tmp_path)
    held, make = [], frozen.to_codes

    def counted(weight, *arguments):
        """The bf16 weights of experts that live while one is being frozen."""
        held.append(len(bf16_weights() - others))
        return make(weight, *arguments)

    freeze_experts(model)
    before, others = step(model)[0], bf16_weights()
    monkeypatch.setattr(frozen, "to_codes", counted)
    found, loaded = frozen_from(tmp_path)
    assert held == [1] * 6
    assert loaded.rounding.weights == frozen_bytes(found) - 4 * sum(
        t.numel() for n, t in found.named_parameters() if n.endswith("proj_scale")
    )
    assert 0 < loaded.rounding.error <= loaded.worst[1] < 0.03
    assert step(found)[0] == before


def rewritten(directory, change, quantization):
    """Give a saved checkpoint other tensors, `change` of the old ones, and say how they are quantised."""
    (path,) = directory.glob("*.safetensors")
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_takes_the_codes_of_an_fp8_checkpoint(family, tmp_path):
    """Written by the operation that transformers writes such files with."""
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
    writer = Fp8Quantize(types.SimpleNamespace(quantization_config=quantization))
    model = model_of(family, hidden_size=256, moe_intermediate_size=128)
    model.save_pretrained(tmp_path)
    written = {}

    def change(tensors):
        for key, tensor in tensors.items():
            is_expert = ".mlp.experts." in key
            written.update(writer._quantize_one(key, tensor) if is_expert else {key: tensor})
        return written

    rewritten(tmp_path, change, quantization.to_dict())
    found, loaded = frozen_from(tmp_path)
    state = found.state_dict()
    for key in [key for key in written if key.endswith("down_proj.weight") and ".experts." in key]:
        prefix, _, rest = key.partition(".experts.")
        expert = int(rest.split(".")[0])
        codes = state[f"{prefix}.experts.down_proj_e4m3"][expert]
        assert torch.equal(codes.view(torch.uint8), written[key].view(torch.uint8))
        scales = state[f"{prefix}.experts.down_proj_scale_inv"][expert]
        torch.testing.assert_close(scales, written[f"{key}_scale_inv"], rtol=3e-7, atol=0)
    # A block of w1 has rows of gate and of up, whose scales differ: it is made again.
    assert loaded.worst[0].endswith("gate_up_proj") and 0.001 < loaded.worst[1] < 0.03
    assert abs(step(found)[0] - step(model)[0]) < 0.01 * step(model)[0]
    found.save_pretrained(tmp_path / "codes")
    again = load_frozen(tmp_path / "codes", **KIND)
    assert step(again.train())[0] == step(found)[0]


@pytest.mark.parametrize("spread", [4, 40])
def test_mxfp4_is_exact_where_its_exponents_are_near(spread, tmp_path):
    model = model_of("gpt-oss", intermediate_size=64)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)

    def change(tensors):
        made = {}
        for key, tensor in tensors.items():
            if not key.endswith(CODES):
                made[key] = tensor
                continue
            experts, inputs, outputs = tensor.shape
            grid = experts, outputs, inputs // 32
            sizes = {"generator": generator, "dtype": torch.uint8}
            made[f"{key}_blocks"] = torch.randint(0, 256, (*grid, 16), **sizes)
            made[f"{key}_scales"] = torch.randint(122 - spread, 123, grid, **sizes)
        return made

    rewritten(tmp_path, change, {"quant_method": "mxfp4"})
    found, loaded = frozen_from(tmp_path)
    if spread == 4:
        assert loaded.rounding.changed == 0 and loaded.rounding.error == 0.0
    else:
        assert 0.1 < loaded.rounding.changed / loaded.rounding.weights < 0.9
        assert 0 < loaded.rounding.error < 1e-3
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager", **KIND
    ).train()
    thaw_experts(found)
    for name in CODES:
        pair = [getattr(experts_of(each), name) for each in (found, plain)]
        assert relative_rmse(*pair) <= loaded.worst[1] * 1.01
    assert abs(step(found)[0] - step(plain)[0]) < 0.02 * step(plain)[0]
