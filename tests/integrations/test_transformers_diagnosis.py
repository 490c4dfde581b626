"""Diagnosis of transformers models: which layer, which parameter, and which expert. adapters_on_ranks.py
has a sharded one.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.utils.parametrize
from findings import captured_calls, fault_of, found, measured, said_by, spoil
from integrations.hf_models import BY_TURNS, FAMILIES, IMPLEMENTATIONS, build, text

from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import dump
from sonicmoe.diagnostics.nonfinite import detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump, save_dump
from sonicmoe.integrations.transformers import invalidate_caches

pytestmark = pytest.mark.usefixtures("registered", "nothing_left_behind")
LAYERS = 3


def step(model):
    model(input_ids=text(), labels=text(), use_cache=False).loss.backward()


def experts_of(model):
    """Experts by the names of their modules."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    }


@BY_TURNS
def test_a_weight_is_named_by_layer_parameter_and_expert(family, implementation, tmp_path):
    """A NaN in the up half of one of the last layer's gate_up_proj; the file names it too."""
    model = build(FAMILIES[family](LAYERS - 1), implementation)
    name, experts = list(experts_of(model).items())[-1]
    weight = experts.gate_up_proj
    # The axis of gate and up is the last one of transposed weights.
    spoil(weight, *((5, 7, 43) if experts.is_transposed else (5, 43, 7)))
    error = found(lambda: step(model), dump_dir=tmp_path)
    line = fault_of(error)
    assert line.startswith(f"first bad: input w1 = {name}.gate_up_proj at expert 5, row ")
    assert ", column 7: nan; 1 NaN" in line
    assert error.report.layer == name
    assert line in said_by("bisect", error.dump, exit_code=1)


def test_a_write_that_left_no_trace_is_found_in_the_weights_and_in_the_copies(blind):
    """FP8 copies are made once. Both ways round: the weight is bad, and only the copy is."""
    model = build(FAMILIES["qwen3-moe"](LAYERS), "sonicmoe_fp8")
    experts = model.model.layers[1].mlp.experts
    weight, sound = experts.gate_up_proj, experts.gate_up_proj[1, 7, 3].item()
    step(model)
    weight.data[1, 7, 3] = float("nan")
    error = str(found(lambda: step(model)))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert error.startswith(f"{name} is not finite (engine reference, call ")
    assert f"first bad: input w1 = {name} at expert 1, row 14, column 3: nan; 1 NaN" in error
    older = "FP8 copies of w1 that are older than the weights: call invalidate_caches()"
    assert older in error

    invalidate_caches(model)
    assert older not in str(found(lambda: step(model)))  # and has made copies of it
    weight.data[1, 7, 3] = sound
    error = str(found(lambda: step(model)))
    assert older in error and "did not repeat" not in error
    invalidate_caches(model)
    with detect_nonfinite():
        step(model)


class Doubled(torch.nn.Module):
    """Computes a weight from the parameter, as adapters do."""

    def forward(self, weight):
        return 2 * weight


@IMPLEMENTATIONS
def test_a_weight_that_is_computed_has_the_name_of_its_attribute(implementation, tmp_path):
    model, path = build(FAMILIES["qwen3-moe"](LAYERS), implementation), tmp_path / "step.npz"
    experts = model.model.layers[1].mlp.experts
    torch.nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", Doubled())
    dump(experts, path)
    step(model)
    written = load_dump(path)
    assert written.caller.layer == "model.layers.1.mlp.experts" and written.dout is not None
    report = bisect(written, "reference")
    assert report.healthy and report.missing == ()
    spoil(experts.parametrizations.gate_up_proj.original, 5, 60, 3)
    error = found(lambda: step(model))
    named = "model.layers.1.mlp.experts.gate_up_proj at expert 5, row "
    assert fault_of(error).startswith(f"first bad: input w1 = {named}")
    original = "model.layers.1.mlp.experts.parametrizations.gate_up_proj.original"
    assert str(error).endswith(f"gate_up_proj is computed from parameters that are not finite: {original}")  # fmt: skip


def test_an_adapter_is_named_in_place_of_the_sound_base_weight():
    peft = pytest.importorskip("peft")
    model = build(FAMILIES["qwen3-moe"](2), "sonicmoe")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=targets))
    name = next(n for n, _ in model.named_parameters() if "layers.1" in n and "lora_A" in n)
    spoil(model.get_parameter(name), 1, 3)
    assert str(found(lambda: step(model))).endswith(f"parameters that are not finite: {name}")


@BY_TURNS
def test_a_healthy_model_passes_and_its_calls_run_again(family, implementation, tmp_path):
    model = build(FAMILIES[family](2), implementation)
    with detect_nonfinite(), captured_calls("step") as cases:
        step(model)
    names = list(experts_of(model))
    wanted = [f"step-{n} {name}" for n, name in enumerate(reversed(names))]
    assert [case.name for case in cases] == wanted
    path = tmp_path / "case.npz"
    save_dump(path, cases[0])
    assert json.loads(said_by("bisect", path, "--json"))["layer"] == names[-1]
    measured(path, bound=0.15)
