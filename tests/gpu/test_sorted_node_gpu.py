"""A node over the parameters of Megatron-Core's experts, on rows that a dispatcher has sorted, whose weights
lie elsewhere in the backward.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import DEVICE
from node.direct_layers import assert_same_bits

from sonicmoe import SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.layer.state import LayerState
from sonicmoe.node.mlp_node import SonicMoEMlpNode
from sonicmoe.weights.parameters import NumberedParameters

pytestmark = pytest.mark.gpu

E, H, I, T = 4, 256, 128, 300
COUNTS = [130, 0, 77, 60]  # 33 rows belong to nobody
ROWS = sum(COUNTS)


def weights_of(shape):
    module = torch.nn.Module()
    for expert in range(E):
        memory = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * shape[1] ** -0.5
        module.register_parameter(f"weight{expert}", torch.nn.Parameter(memory))
        getattr(module, f"weight{expert}").main_grad = torch.zeros(shape, device=DEVICE)
    return module


def gather_elsewhere(weights):
    """As FSDP, between a forward and its backward."""
    values = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    hold = [torch.full_like(value, float("nan")) for value in values]  # where they were
    for weight, value in zip(weights, values, strict=True):
        weight.untyped_storage().resize_(value.numel() * value.element_size())
        weight.data.copy_(value)
    return hold


@pytest.mark.parametrize("through_autograd", [False, True])
@pytest.mark.parametrize(("engine", "mode"), [("bf16", "off"), ("hopper", "perf")])
def test_the_bits_of_weights_that_stay(engine, mode, through_autograd):
    """Rows behind those of experts are read by nobody, and their output is zeros."""

    def step(moves):
        torch.manual_seed(0)
        modules = weights_of((2 * I, H)), weights_of((H, I))
        weights = [weight for module in modules for weight in module.parameters()]
        x, dout = (torch.randn(T, H, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        x[ROWS:] = float("nan")
        probs = torch.rand(T, device=DEVICE)
        options = {"through_autograd": through_autograd}
        held = NumberedParameters(*modules, (E, H, I), ActivationType.SWIGLU, **options)
        config = SonicMoEConfig(engine=engine, fp8_mode=mode)
        node = SonicMoEMlpNode.over(LayerState(held), ActivationType.SWIGLU, config=config)
        x.requires_grad_(), probs.requires_grad_()
        out = node.forward_sorted(x, torch.tensor(COUNTS, device=DEVICE), probs)
        kept = gather_elsewhere(weights) if moves else None
        out.backward(dout)
        del kept
        name = "grad" if through_autograd else "main_grad"
        return [out.detach(), x.grad, probs.grad, *(getattr(w, name) for w in weights)]

    stayed, moved = step(False), step(True)
    assert_same_bits(moved, stayed)
    assert bool(stayed[0][:ROWS].any()) and not stayed[0][ROWS:].any()
