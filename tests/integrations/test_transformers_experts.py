"""GPT-OSS's experts as DTensors, and their graphs. The oracle has every arrangement and sentinels,
test_transformers_walk.py every class.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from findings import found, spoil
from integrations.experts_walk import TOKENS, batch, small_experts
from integrations.hf_models import IMPLEMENTATIONS, errors, relative_rmse, run_experts
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


def make_gpt_oss():
    """Experts of one's own, because tests change them."""
    return copy.deepcopy(small_experts(GptOssExperts))


@pytest.fixture
def distributed(tmp_path):
    """Experts whose weights are DTensors on a mesh of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    experts = make_gpt_oss()
    for name, parameter in list(experts.named_parameters()):
        setattr(
            experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        )
    yield experts
    dist.destroy_process_group()


def test_local_parts_of_dtensors(distributed):
    """Weights as DTensors: the forward reads this rank's part, and gradients come back as DTensors."""
    expected = run_experts(make_gpt_oss(), "eager", *batch())
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
    error = found(lambda: run_experts(distributed, implementation, *batch()))
    assert "first bad: input w1 = 0.gate_up_proj.to_local() at expert 3, row " in str(error)
    assert error.report.layer == "0" and len(model) == 1


def test_other_numbers_of_tokens_make_no_more_graphs_than_transformers_own():
    def graphs(implementation):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        experts = make_gpt_oss()
        experts.config._experts_implementation = implementation
        forward = torch.compile(experts, fullgraph=True, backend=counter)
        x, ids, weights, dout = batch()
        for tokens in (TOKENS, 32, 31, 7, 1, 30, 3, 36):
            leaf = x[:tokens].detach().requires_grad_()
            forward(leaf, ids[:tokens], weights[:tokens].detach()).backward(dout[:tokens])
        return counter.frame_count

    stock = graphs("grouped_mm")
    assert stock <= 4
    assert max(graphs("sonicmoe"), graphs("sonicmoe_fp8")) <= stock
