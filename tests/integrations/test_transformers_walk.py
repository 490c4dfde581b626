"""Every class of experts in the installed transformers equals its eager forward here, in FP8 too, or
is refused by name.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from integrations.experts_walk import batch, decorated, section, small_experts
from integrations.hf_models import errors, run_experts

from sonicmoe.integrations.transformers import unsupported_reason
from sonicmoe.interop import parse_version

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- made by tests/integrations/experts_walk.py -->\n\n", "\n\n<!-- end -->"
EXACT = 1e-5  # measured: 5e-7
FP8 = 0.075  # measured: 6.9 %, what 3 mantissa bits leave
# Every other class runs. What transformers adds is equal, or joins this list with its reason.
REFUSED = {"MuseSparkExperts": "normalises the output of every expert"}


@pytest.mark.parametrize("name", decorated())
def test_every_class_equals_eager_or_is_refused_by_name(name):
    experts = small_experts(decorated()[name])
    if name in REFUSED:
        assert REFUSED[name] in unsupported_reason(experts)
        return
    # Many pre-activations lie beyond every clamp.
    far = batch(spread=8.0)
    found = errors(run_experts(experts, "sonicmoe", *far), run_experts(experts, "eager", *far))
    assert max(found.values()) <= EXACT, found
    exact = run_experts(copy.deepcopy(experts).double(), "eager", *batch(dtype=torch.float64))
    found = errors(run_experts(experts, "sonicmoe_fp8", *batch()), exact)
    assert max(found.values()) <= FP8, found


# GPT-OSS's gate and biases, a clamp, GELU's tanh form.
@pytest.mark.parametrize("name", ["GptOssExperts", "DeepseekV4Experts", "Gemma4TextExperts"])
def test_experts_of_newer_models_are_saved_loaded_and_compiled_into_one_graph(name, tmp_path):
    if name not in decorated():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch._dynamo.reset()
    experts = small_experts(decorated()[name])
    expected = run_experts(experts, "sonicmoe_fp8", *batch())
    torch.save(experts.state_dict(), tmp_path / "experts.pt")
    loaded = copy.deepcopy(experts)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    # Codes of other weights are kept by now.
    assert not run_experts(loaded, "sonicmoe_fp8", *batch())["out"].any()
    loaded.load_state_dict(torch.load(tmp_path / "experts.pt", weights_only=True))
    graph = torch.compile(loaded, fullgraph=True, backend="aot_eager")
    graph.named_parameters = loaded.named_parameters
    for module in (loaded, graph):
        found = run_experts(module, "sonicmoe_fp8", *batch())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_page_has_what_was_found():
    """`PYTHONPATH=.:tests python -m integrations.experts_walk` prints the section."""
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    version = transformers.__version__
    if parse_version(version) < parse_version(shown.split()[1]):
        pytest.skip(f"the page is about a newer transformers than {version}")
    assert shown == section()
