"""A node on a GPU that is not the thread's current one: launches, allocations and tensor maps
belong to its tensors' device.
"""

from __future__ import annotations

import pytest
import torch
from gpu.hopper_step import Batch, main_grads, make_batch, make_experts, make_node, run

from sonicmoe import SonicMoEConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def step_on(device: str, config: SonicMoEConfig) -> list[torch.Tensor]:
    """out, dx, dprobs and every main_grad, on the host."""
    experts = make_experts().to(device)
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=device)
    x, indices, probs, dout = (tensor.detach().to(device) for tensor in make_batch().tensors)
    node = make_node(experts, config)
    results = run(node, Batch(x.requires_grad_(), indices, probs.requires_grad_(), dout))
    node.step()
    return [tensor.cpu() for tensor in (*results, *main_grads(experts))]


@pytest.mark.parametrize("engine", ["hopper", "bf16"])
def test_gives_the_bits_of_the_current_one(engine: str) -> None:
    config = SonicMoEConfig(fp8_mode="perf" if engine == "hopper" else "off", engine=engine)
    assert torch.cuda.current_device() == 0
    second = step_on("cuda:1", config)  # before the current one has loaded anything
    first = step_on("cuda:0", config)
    assert torch.cuda.current_device() == 0
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert any(bool(tensor.any()) for tensor in first)
