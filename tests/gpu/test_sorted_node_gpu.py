"""A node over the parameters of Megatron-Core's experts, on rows that a dispatcher has sorted, against
plain operations in fp32.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import DEVICE
from gpu.engine_cases import relative

from sonicmoe import SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.layer.state import LayerState
from sonicmoe.node.mlp_node import SonicMoEMlpNode
from sonicmoe.weights.numbered import NumberedParameters

pytestmark = pytest.mark.gpu

E, H, I, T = 4, 256, 128, 300
COUNTS = [130, 0, 77, 60]  # 33 rows belong to nobody
ROWS = sum(COUNTS)


def weights_of(shape):
    module = torch.nn.Module()
    for expert in range(E):
        memory = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * shape[1] ** -0.5
        module.register_parameter(f"weight{expert}", torch.nn.Parameter(memory))
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


def plain(x, probs, weights):
    rows = []
    for expert, part in enumerate(x[:ROWS].split(COUNTS)):
        gate, up = (part @ weights[expert].T).chunk(2, -1)
        rows.append((torch.nn.functional.silu(gate) * up) @ weights[E + expert].T)
    return torch.cat(rows) * probs[:ROWS].unsqueeze(-1)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("through_autograd", [False, True])
@pytest.mark.parametrize(
    ("engine", "mode", "bound"), [("bf16", "off", 0.02), ("hopper", "perf", 0.1)]
)
def test_equals_plain_operations(engine, mode, bound, through_autograd, moved):
    torch.manual_seed(0)
    modules = weights_of((2 * I, H)), weights_of((H, I))
    weights = [weight for module in modules for weight in module.parameters()]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x, dout = (torch.randn(T, H, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    probs = torch.rand(T, device=DEVICE)
    inputs = [tensor.float().requires_grad_() for tensor in (x, probs, *weights)]
    wanted = plain(inputs[0], inputs[1], inputs[2:])
    gradients = torch.autograd.grad(wanted, inputs, dout[:ROWS].float(), allow_unused=True)
    x[ROWS:] = float("nan")
    options = {"through_autograd": through_autograd}
    held = NumberedParameters(*modules, (E, H, I), ActivationType.SWIGLU, **options)
    config = SonicMoEConfig(engine=engine, fp8_mode=mode)
    node = SonicMoEMlpNode.over(LayerState(held), ActivationType.SWIGLU, config=config)
    x.requires_grad_(), probs.requires_grad_()
    out = node.forward_sorted(x, torch.tensor(COUNTS, device=DEVICE), probs)
    kept = gather_elsewhere(weights) if moved else None
    out.backward(dout)
    found = [x.grad, probs.grad, *(w.grad if through_autograd else w.main_grad for w in weights)]
    assert (out[ROWS:] == 0.0).all()
    for one, other in zip((out[:ROWS], *found), (wanted, *gradients), strict=True):
        if other is None or not other.any():  # an expert without rows
            assert not one.any()
        else:
            assert relative(one.float().reshape(1, -1), other.reshape(1, -1)).item() < bound
    del kept
