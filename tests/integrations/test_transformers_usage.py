"""What users do with a model around training: mixed precision, decoding with a cache, saving and
loading.
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
    relative_rmse,
    run,
    text,
)

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.integrations.transformers import invalidate_caches

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def token_dtypes(monkeypatch):
    """The dtype of the tokens of every forward of the engine."""
    seen, original = [], ReferenceEngine.forward

    def forward(self, x, *arguments, **options):
        seen.append(x.dtype)
        return original(self, x, *arguments, **options)

    monkeypatch.setattr(ReferenceEngine, "forward", forward)
    return seen


def prompt() -> torch.Tensor:
    return text(5, seed=2)


@BY_TURNS
def test_autocast_lowers_the_experts_whatever_the_norms_return(
    family, implementation, token_dtypes
):
    """fp32 parameters: as near to the exact run as `eager` under autocast, gradients in fp32."""
    model = build(FAMILIES[family](1))
    exact = run(model, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        rounded, found = run(model, "eager"), run(model, implementation)
    assert set(token_dtypes) == {torch.bfloat16}
    assert [found[name].dtype for name in rounded] == [t.dtype for t in rounded.values()]
    limit = max(errors(rounded, exact).values())
    limit = 1.5 * limit if implementation == "sonicmoe" else limit + 0.1
    assert 1e-4 < max(errors(found, exact).values()) <= limit


@BY_TURNS
def test_decoding_with_a_cache_equals_one_forward(family, implementation):
    """One token per sequence and step: the logits of every step are those of the whole text, and
    greedy text is `eager`'s.
    """
    model = build(FAMILIES[family](2)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "use_cache": True}
    expected = model.generate(prompt(), **options)
    model.set_experts_implementation(implementation)
    generated = model.generate(
        prompt(), **options, output_scores=True, return_dict_in_generate=True
    )
    with torch.inference_mode():
        whole = model(generated.sequences).logits[:, 4:-1]
    assert generated.sequences.shape == (2, 13)
    assert relative_rmse(torch.stack(generated.scores, 1), whole) <= 3e-6
    if implementation == "sonicmoe":
        assert torch.equal(generated.sequences, expected)


def test_writes_without_a_trace_are_announced_for_the_whole_model(blind):
    model = build(FAMILIES["mixtral"](2), "sonicmoe_fp8").eval()
    old = model(prompt()).logits
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data.mul_(0.5)
        layer.mlp.experts.down_proj.data.mul_(2.0)
    assert torch.equal(model(prompt()).logits, old)  # nobody said it
    invalidate_caches(model)
    found = model(prompt()).logits
    model.set_experts_implementation("eager")
    expected = model(prompt()).logits
    assert relative_rmse(found, expected) < 0.2 < relative_rmse(old, expected)


@IMPLEMENTATIONS
def test_the_forward_imports_nothing(implementation, monkeypatch):
    """Compilers trace it: an import of a lazy module inside is an error to some of them."""
    model = build(FAMILIES["mixtral"](1))
    expected = run(model, implementation)
    for name in [name for name in sys.modules if name.startswith("transformers.integrations")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert max(errors(run(model, implementation), expected).values()) == 0
