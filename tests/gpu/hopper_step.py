"""A layer for the node's GPU tests; run as a program, one forward, backward and step of it, small
enough for a sanitizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu.device import DEVICE
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

FP8 = SonicMoEConfig(fp8_mode="perf", engine="hopper")  # by name: a fallback would prove nothing
E, H, I, K, T = 6, 512, 384, 3, 700


class Expert(nn.Module):
    """ERNIE's arrangement, bf16, with a private fp32 `main_grad`."""

    def __init__(self, hidden, inner, generator):
        super().__init__()
        self.up_gate_proj, self.down_proj = nn.Module(), nn.Module()
        for module, shape in (
            (self.up_gate_proj, (hidden, 2 * inner)),
            (self.down_proj, (inner, hidden)),
        ):
            values = torch.randn(shape, generator=generator) * shape[0] ** -0.5
            module.weight = nn.Parameter(values.to(DEVICE, torch.bfloat16))
            module.weight.main_grad = torch.zeros(shape, device=DEVICE)


def make_experts(seed=0, experts=E, hidden=H, inner=I):
    """The same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return nn.ModuleList(Expert(hidden, inner, generator) for _ in range(experts))


def make_node(experts, config=FP8, **options):
    hidden, inner = experts[0].up_gate_proj.weight.shape[0], experts[0].down_proj.weight.shape[0]
    return SonicMoEMlpNode(experts, len(experts), hidden, inner, config=config, **options)


def main_grads(experts):
    return [parameter.main_grad for parameter in experts.parameters()]


@dataclass
class Batch:
    """Leaves x and probs that want gradients; both sentinels among the indices."""

    x: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    dout: torch.Tensor

    @property
    def tensors(self):
        return self.x, self.indices, self.probs, self.dout


def make_batch(tokens=T, seed=0, hidden=H, experts=E, topk=K, invalid=0.3):
    generator = torch.Generator().manual_seed(1000 + seed)
    x, dout = (
        torch.randn(tokens, hidden, generator=generator).to(DEVICE, torch.bfloat16)
        for _ in range(2)
    )
    indices = torch.rand(tokens, experts, generator=generator).topk(topk, 1).indices
    dropped, first = (
        torch.rand(tokens, topk, generator=generator) < share for share in (invalid, 0.5)
    )
    indices[dropped] = torch.where(first, -1, experts)[dropped]
    probs = torch.rand(tokens, topk, generator=generator) + 0.05
    return Batch(x.requires_grad_(), indices.to(DEVICE), probs.to(DEVICE).requires_grad_(), dout)


def forward(node, batch, counts=None):
    return node(batch.x, counts, batch.indices, batch.probs)


def backward(out, batch):
    """`(dx, dprobs)`; weight gradients go where the node has them go."""
    leaves = [
        function.variable
        for function, _ in out.grad_fn.next_functions
        if hasattr(function, "variable")
    ]
    weights = [leaf for leaf in leaves if leaf is not batch.x and leaf is not batch.probs]
    out.backward(batch.dout, inputs=(batch.x, batch.probs, *weights))
    found = batch.x.grad, batch.probs.grad
    batch.x.grad = batch.probs.grad = None
    return found


def run(node, batch):
    """`(out, dx, dprobs)` of one micro-batch."""
    out = forward(node, batch)
    return (out.detach(), *backward(out, batch))


def main():
    """T=200, H=256, I=128, E=3, K=2."""
    experts = make_experts(0, 3, 256, 128)
    node = make_node(experts)
    results = run(node, make_batch(200, 0, 256, 3, 2))
    node.step()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*results, *main_grads(experts)))
    print("one step is done")


if __name__ == "__main__":
    main()
