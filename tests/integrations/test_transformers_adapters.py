"""peft's adapters on the weights of experts (`target_parameters`): computed here as low-rank products,
beside peft alone, which adds them to the weights. test_examples.py has them on two ranks.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from integrations.hf_models import (
    FAMILIES,
    IMPLEMENTATIONS,
    build,
    errors,
    relative_rmse,
    run,
    text,
)

peft = pytest.importorskip("peft", minversion="0.17")
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402

from sonicmoe.engine.low_rank import NAMES_OF_FACTORS  # noqa: E402
from sonicmoe.engine.reference import ReferenceEngine  # noqa: E402
from sonicmoe.integrations.transformers import check_model, register  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@pytest.fixture
def narrow(monkeypatch):
    """A product of the size of a weight fails the test, as does a weight that is parametrized."""

    def refuse(*arguments, **options):
        raise AssertionError("a product of full size")

    for owner, name in ((ParamWrapper, "get_delta_weight"), (ParamWrapper, "_activate_lora")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(ReferenceEngine, "backward_dw", refuse)


def config_of(targets=(UP, DOWN), **options):
    options = {"r": 4, "lora_alpha": 6, "target_modules": [], "init_lora_weights": False, **options}
    return peft.LoraConfig(target_parameters=list(targets), **options)


def adapted(family="qwen3-moe", layers=1, **options):
    torch.manual_seed(3)
    return peft.get_peft_model(build(FAMILIES[family](layers)), config_of(**options))


def alone(model):
    """What peft gives without this engine."""
    return run(model.get_base_model(), "eager")


CASES = (
    ("qwen3-moe", {}),
    ("mixtral", {"r": 3, "use_rslora": True}),
    ("gpt-oss", {"rank_pattern": {UP: 5}, "alpha_pattern": {DOWN: 3}}),
    ("deepseek-v3", {"targets": (DOWN,)}),
    ("gpt-oss", {"targets": (UP,), "target_modules": ["q_proj", "v_proj"]}),
)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # which peft uses all the same
@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_peft(family, options, request):
    model = adapted(family, layers=2, **options)
    expected = alone(model)
    request.getfixturevalue("narrow")
    found = run(model.get_base_model(), "sonicmoe")
    assert all("lora_" in name for name in expected if name != "logits")
    assert max(errors(found, expected).values()) < 5e-6


def logits_of(model, implementation):
    with torch.no_grad():
        model.get_base_model().set_experts_implementation(implementation)
        return model(input_ids=text()).logits


def test_several_adapters_one_or_more_active():
    model = adapted()
    model.add_adapter("other", config_of(r=7, lora_alpha=3))

    def both():
        found = logits_of(model, "sonicmoe")
        assert relative_rmse(found, logits_of(model, "eager")) < 5e-6
        return found

    seen = [both()]
    model.set_adapter("other")
    seen.append(both())
    model.base_model.set_adapter(["default", "other"])
    seen.append(both())
    with model.disable_adapter():
        seen.append(both())
    assert all(
        relative_rmse(one, other) > 1e-3 for index, one in enumerate(seen) for other in seen[:index]
    )
    assert [n for n, p in model.named_parameters() if p.requires_grad and "other" in n]


def test_merging_and_unmerging(narrow, monkeypatch):
    model = adapted()
    apart = logits_of(model, "sonicmoe")
    monkeypatch.undo()
    model.merge_adapter()
    assert relative_rmse(logits_of(model, "sonicmoe"), apart) < 5e-6
    model.unmerge_adapter()
    assert relative_rmse(logits_of(model, "sonicmoe"), apart) < 5e-6
    base = model.merge_and_unload()
    assert not any("lora" in name for name, _ in base.named_parameters())
    assert relative_rmse(base(input_ids=text()).logits, apart) < 5e-6


@pytest.mark.parametrize("safe", [False, True])
def test_kept_codes_follow_a_merge_that_leaves_no_trace(safe, blind):
    """`merge` writes through `.data`."""
    model = adapted()
    apart = logits_of(model, "sonicmoe_fp8")
    model.merge_adapter(safe_merge=safe)
    merged = logits_of(model, "sonicmoe_fp8")
    model.unmerge_adapter()
    assert relative_rmse(merged, apart) < 0.1
    with model.disable_adapter():
        assert relative_rmse(logits_of(model, "sonicmoe_fp8"), merged) > 0.1


def several_adapters():
    model = adapted("mixtral", layers=2, r=100)
    model.add_adapter("other", config_of(r=29))
    model.base_model.set_adapter(["default", "other"])
    return model


TOO_HIGH = {
    "one rank": (lambda: adapted("mixtral", layers=2, r=129), r"\['default'\] of (gate_up|down)_proj"),
    "one weight's": (lambda: adapted("gpt-oss", r=4, rank_pattern={UP: 130}), r"\['default'\] of gate_up_proj"),
    "a sum": (several_adapters, r"\['default', 'other'\] of (gate_up|down)_proj"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
@pytest.mark.parametrize("case", TOO_HIGH)
def test_ranks_that_no_engine_takes_are_left_to_peft_and_said(case, caplog):
    make, words = TOO_HIGH[case]
    model = make().get_base_model()
    expected = run(model, "eager")
    said = 1 if case == "one weight's" else 2  # a line for each kind of weight
    caplog.set_level("WARNING", "sonicmoe")
    for act in (lambda: check_model(model), lambda: [run(model, "sonicmoe") for _ in range(2)]):
        caplog.clear()
        model.set_experts_implementation("sonicmoe")
        act()
        lines = [record.getMessage() for record in caplog.records]
        about = [
            line for line in lines if re.search(f"^active adapters {words}.* above 128: peft", line)
        ]
        assert len(about) == said, lines
    assert max(errors(run(model, "sonicmoe"), expected).values()) < 5e-6


def test_adapters_of_older_versions_of_peft(narrow):
    """Before 0.19 the outputs of untransposed weights were called inputs: `delta[e] = (B_e A_e)^T`."""
    model = adapted("mixtral")
    wrapper = model.get_base_model().model.layers[0].mlp.experts.base_layer
    assert wrapper.parameter_name == "gate_up_proj"
    inputs, outputs = wrapper.in_features, wrapper.out_features
    a, b = torch.randn(4 * 6, outputs) * 0.1, torch.randn(inputs, 4 * 6)
    wrapper.lora_A["default"].weight = torch.nn.Parameter(a)
    wrapper.lora_B["default"].weight = torch.nn.Parameter(b)
    wrapper._did_swap_in_out_features = False
    found = logits_of(model, "sonicmoe")
    delta = torch.einsum("ore,eri->eio", b.reshape(inputs, 4, 6), a.reshape(6, 4, outputs))
    wrapper.get_param().data += 1.5 * delta
    wrapper.set_adapter([])
    assert relative_rmse(found, logits_of(model, "sonicmoe")) < 5e-6


def test_a_process_without_peft_registers(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", None)
    register()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, narrow):
    model = adapted(layers=2)
    base = model.get_base_model()
    expected = run(base, "sonicmoe_fp8")
    model.enable_input_require_grads()
    options = {"use_reentrant": reentrant}
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    found = run(base, "sonicmoe_fp8")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@IMPLEMENTATIONS
def test_compiled_without_a_graph_break(implementation, narrow):
    model = adapted("gpt-oss").get_base_model()
    expected = run(model, implementation)
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    found = run(model, implementation)
    assert max(errors(found, expected).values()) < 1e-5
    torch._dynamo.reset()


def test_an_observer_sees_the_weights_that_the_layer_computes_with(monkeypatch):
    from sonicmoe import observe

    model, seen = adapted(), []
    model.get_base_model().set_experts_implementation("sonicmoe")
    with observe.observing(seen.append):
        ids = text()
        model(input_ids=ids, labels=ids).loss.backward()
    assert {type(event) for event in seen} == {observe.ForwardDone, observe.BackwardBegins, observe.BackwardDone}  # fmt: skip
    names = [name for name, _ in seen[-1].weight_gradients()]
    assert names == list(NAMES_OF_FACTORS)
    _, w2, *_ = seen[0].call.native_weights()
    experts = model.get_base_model().model.layers[0].mlp.experts
    experts.merge()
    assert relative_rmse(w2, experts.get_param()) < 1e-6


def test_autocast():
    """As in the Trainer's mixed precision: as near to exact results as peft's alone, gradients in fp32."""
    model = adapted("mixtral", layers=2)
    exact = alone(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, found = alone(model), run(model.get_base_model(), "sonicmoe")
    assert [found[name].dtype for name in rounded] == [each.dtype for each in rounded.values()]
    limit, error = (max(errors(each, exact).values()) for each in (rounded, found))
    assert 1e-4 < error <= 1.5 * limit
