"""Experts without a row in a batch: gradients of zeros, or none where that is asked for."""

from __future__ import annotations

import copy

import framework
import pytest
from framework import torch

from sonicmoe.ernie_compat import SonicMoEMlpNode

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="modules and optimizers of PyTorch")
E, H, I = 4, 16, 8
IDLE = 2


class Expert(torch.nn.Module if not framework.IS_PADDLE else object):
    def __init__(self):
        super().__init__()
        self.up_gate_proj, self.down_proj = (
            torch.nn.Linear(n, m, bias=False) for n, m in ((2 * I, H), (H, I))
        )

    def forward(self, x):
        gate, up = (x @ self.up_gate_proj.weight).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ self.down_proj.weight


def experts_of(shared=False):
    torch.manual_seed(0)
    experts = torch.nn.ModuleList(Expert() for _ in range(E))
    if shared:
        experts[IDLE].down_proj = experts[0].down_proj
    return experts


def routed():
    """Nobody goes to the idle expert."""
    indices = torch.tensor([[0, 1], [1, 3], [3, 0]] * 4)
    return torch.randn(12, H), indices, torch.rand(12, 2)


def stepped(experts, run):
    """The experts after a step of AdamW with weight decay."""
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.5)
    run(experts).square().sum().backward()
    grads = {name: weight.grad for name, weight in experts.named_parameters()}
    optimizer.step()
    return grads


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_optimizer_leaves_them_as_it_does_in_a_loop(shared, counted):
    x, indices, probs = routed()
    counts = indices.flatten().bincount(minlength=E).tolist() if counted else None

    def loop(experts):
        out = torch.zeros_like(x)
        for e in set(indices.flatten().tolist()):
            token, slot = torch.nonzero(indices == e, as_tuple=True)
            out = out.index_add(0, token, experts[e](x[token]) * probs[token, slot, None])
        return out

    def engine(idle_grads):
        return lambda experts: SonicMoEMlpNode(experts, E, H, I, idle_grads=idle_grads)(
            x, counts, indices, probs
        )

    begin = experts_of(shared)
    expected, none, zeros = (copy.deepcopy(begin) for _ in range(3))
    wanted = stepped(expected, loop)
    found = stepped(none, engine(False))
    assert [name for name, grad in found.items() if grad is None] == [
        name for name, grad in wanted.items() if grad is None
    ] and any(grad is None for grad in found.values())
    for name, weight in none.named_parameters():
        torch.testing.assert_close(weight, expected.get_parameter(name), rtol=1e-4, atol=1e-5)
    # By default they are zeros, as of stacked parameters, and the weights decay.
    assert not stepped(zeros, engine(True))[f"{IDLE}.up_gate_proj.weight"].any()
    decayed = zeros[IDLE].up_gate_proj.weight / begin[IDLE].up_gate_proj.weight
    torch.testing.assert_close(decayed, torch.full_like(decayed, 1 - 0.1 * 0.5))
