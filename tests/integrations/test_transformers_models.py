"""Whole transformers models on the engine: `eager`'s numbers in full precision, FP8's error in FP8,
in every way of training.
"""

from __future__ import annotations

import sys

import pytest
import torch
from integrations.hf_models import (
    BY_TURNS,
    FAMILIES,
    IMPLEMENTATIONS,
    build,
    errors,
    run,
)
from transformers.integrations import moe as hf_moe

from sonicmoe import SonicMoEConfig
from sonicmoe.integrations.transformers import check_model, register
from sonicmoe.observe import ForwardDone, observing

pytestmark = pytest.mark.usefixtures("registered")
EXACT = 2e-6  # fp32 sums in another order


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_in_full_precision(family):
    model, seen = build(FAMILIES[family](2)), []
    expected = run(model, "eager")
    model.set_experts_implementation("sonicmoe")
    check_model(model)
    with observing(seen.append):
        found = errors(run(model, "sonicmoe"), expected)
    assert max(found.values()) <= EXACT, found
    recipes = [event.call.settings.recipe for event in seen if isinstance(event, ForwardDone)]
    assert recipes == [None, None], "two MoE layers, nothing quantised"
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == (8 if family == "gpt-oss" else 4), (
        "weights of two layers, and biases where there are any"
    )
    assert all(expected[name].any() for name in experts)


def test_sonicmoe_follows_the_configuration():
    model = build(FAMILIES["mixtral"](1))
    plain = run(model, "sonicmoe")
    with SonicMoEConfig(fp8_mode="perf").activate():
        configured = run(model, "sonicmoe")
    fp8 = run(model, "sonicmoe_fp8")
    assert max(errors(configured, fp8).values()) == 0 < errors(fp8, plain)["logits"]


# Refusals and registration


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_check_warns_of_another_implementation(implementation, caplog):
    """Nothing else would say that a model runs without this package."""
    check_model(build(FAMILIES["mixtral"](2), implementation))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("sonicmoe", "WARNING")
    assert (
        f"MixtralForCausalLM does not run on sonicmoe: its experts implementation is '{implementation}'"
        in record.message
    )
    assert "model.set_experts_implementation('sonicmoe' or 'sonicmoe_fp8')" in record.message


@pytest.mark.parametrize("theirs", [True, False], ids=["the kernel hub's", "nobody's"])
def test_the_check_warns_where_nothing_was_registered(theirs, caplog, monkeypatch):
    model = build(FAMILIES["mixtral"](1), "sonicmoe")
    registry = dict(hf_moe.ExpertsInterface._global_mapping)
    registry["sonicmoe"] = hf_moe.sonicmoe_experts_forward
    if not theirs:
        del registry["sonicmoe"]
    monkeypatch.setattr(hf_moe.ExpertsInterface, "_global_mapping", registry)
    check_model(model)
    assert "experts implementation 'sonicmoe' is not this package's" in caplog.text
    assert "call sonicmoe.integrations.transformers.register()" in caplog.text
    caplog.clear()
    register()
    check_model(model)
    assert not caplog.records


@pytest.mark.parametrize(
    ("inner", "said"), [(100, "H is 64 and I is 100, and it needs multiples"), (64, "")]
)
def test_the_check_warns_of_sizes_that_no_kernel_takes(inner, said, caplog):
    """As the first forward does; fp32 parameters may be trained under autocast."""
    config = FAMILIES["qwen3-moe"](1)
    config.moe_intermediate_size = inner
    check_model(build(config, "sonicmoe_fp8"))
    assert (said in caplog.text) if said else not caplog.records, caplog.text


# Around training


@BY_TURNS
def test_autocast_lowers_the_experts_whatever_the_norms_return(family, implementation):
    """fp32 parameters: as near to the exact run as `eager` under autocast, gradients in fp32."""
    model, seen = build(FAMILIES[family](1)), []
    exact = run(model, "eager")
    with torch.autocast("cpu", torch.bfloat16), observing(seen.append):
        rounded, found = run(model, "eager"), run(model, implementation)
    read = {event.x.dtype for event in seen if isinstance(event, ForwardDone)}
    assert read == {torch.bfloat16}
    assert [found[name].dtype for name in rounded] == [t.dtype for t in rounded.values()]
    limit = max(errors(rounded, exact).values())
    limit = 1.5 * limit if implementation == "sonicmoe" else limit + 0.1
    assert 1e-4 < max(errors(found, exact).values()) <= limit


@IMPLEMENTATIONS
def test_the_forward_imports_nothing(implementation, monkeypatch):
    """Compilers trace it: an import of a lazy module inside is an error to some of them."""
    model = build(FAMILIES["mixtral"](1))
    expected = run(model, implementation)
    for name in [name for name in sys.modules if name.startswith("transformers.integrations")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert max(errors(run(model, implementation), expected).values()) == 0
