"""Every class of experts in the installed transformers equals its eager forward here, in FP8 too, or
is refused by name.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from findings import found as finding
from findings import spoil
from integrations.experts_walk import TOKENS, batch, decorated, section, small_experts
from integrations.hf_models import IMPLEMENTATIONS, errors, relative_rmse, run_experts
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

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


# GPT-OSS's experts as DTensors, and their graphs


@pytest.fixture
def distributed(tmp_path):
    """Experts whose weights are DTensors on a mesh of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    experts = copy.deepcopy(small_experts(GptOssExperts))
    for name, parameter in list(experts.named_parameters()):
        setattr(
            experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        )
    yield experts
    dist.destroy_process_group()


def test_local_parts_of_dtensors(distributed):
    """Weights as DTensors: the forward reads this rank's part, and gradients come back as DTensors."""
    expected = run_experts(copy.deepcopy(small_experts(GptOssExperts)), "eager", *batch())
    for implementation, bound in (("sonicmoe", 1e-6), ("sonicmoe_fp8", 0.1)):
        found = run_experts(distributed, implementation, *batch())
        assert isinstance(found["down_proj"], DTensor)
        local = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in found.items()}
        assert max(errors(local, expected).values()) <= bound


@pytest.mark.parametrize("training", [False, True])
@IMPLEMENTATIONS
def test_in_place_changes_of_dtensors_are_seen(distributed, implementation, training):
    """They move no version counter of the local part, in which kept codes would look current."""
    distributed.config._experts_implementation, (x, ids, weights, _) = implementation, batch()
    outputs = []
    for factor in (1.0, -1.5):
        with torch.no_grad():
            distributed.down_proj.mul_(factor)
            distributed.down_proj_bias.mul_(factor)
        with torch.set_grad_enabled(training):
            outputs.append(distributed(x, ids, weights).detach())
    assert relative_rmse(outputs[1], -1.5 * outputs[0]) < 0.02


@IMPLEMENTATIONS
def test_a_nan_is_found_in_this_ranks_part(distributed, implementation):
    spoil(distributed.gate_up_proj.to_local(), 3, 60, 3)
    model = nn.ModuleList([distributed])
    error = finding(lambda: run_experts(distributed, implementation, *batch()))
    assert "first bad: input w1 = 0.gate_up_proj.to_local() at expert 3, row " in str(error)
    assert error.report.layer == "0" and len(model) == 1


def test_other_numbers_of_tokens_make_no_more_graphs_than_transformers_own():
    def graphs(implementation):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        experts = copy.deepcopy(small_experts(GptOssExperts))
        experts.config._experts_implementation = implementation
        forward = torch.compile(experts, fullgraph=True, backend=counter)
        x, ids, weights, dout = batch()
        for tokens in (TOKENS, 32, 31, 1, 36):
            leaf = x[:tokens].detach().requires_grad_()
            forward(leaf, ids[:tokens], weights[:tokens].detach()).backward(dout[:tokens])
        return counter.frame_count

    stock = graphs("grouped_mm")
    assert stock <= 4
    assert max(graphs("sonicmoe"), graphs("sonicmoe_fp8")) <= stock
