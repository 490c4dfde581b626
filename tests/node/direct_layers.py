"""The layer of the node's GPU tests (tests/gpu/test_hopper_node_gpu.py), with zeros around each of its
gradients. PyTorch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oracle.held import spelled, written_beside
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

ARRANGEMENTS = ("per_expert", "fused", "native")


@dataclass(frozen=True)
class Setup:
    """An engine and sizes: E, H, I, K; one expert has no token."""

    config: SonicMoEConfig
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int, int, int] = (4, 40, 24, 2)
    tokens: int = 30


class Expert(nn.Module):
    """ERNIE's arrangement."""

    def __init__(self, up, down):
        super().__init__()
        self.up_gate_proj, self.down_proj = nn.Module(), nn.Module()
        self.up_gate_proj.weight, self.down_proj.weight = nn.Parameter(up), nn.Parameter(down)


class DirectLayer:
    """A node over experts of one arrangement, the same values for the same seed."""

    def __init__(
        self, setup, arrangement="per_expert", memory="own", *, flush="auto", seed=0, **options
    ):
        self.setup, self.arrangement = setup, arrangement
        experts, hidden, inner, _ = setup.sizes
        generator = torch.Generator().manual_seed(seed)
        up = torch.randn((experts, hidden, 2 * inner), generator=generator) * hidden**-0.5
        down = torch.randn((experts, inner, hidden), generator=generator) * inner**-0.5
        if arrangement == "native":
            up = torch.stack(up.chunk(2, 2), 3).flatten(2).transpose(1, 2).contiguous()
            down = down.transpose(1, 2).contiguous()
        up, down = (weight.to(setup.device, setup.dtype) for weight in (up, down))
        self.options = {"config": setup.config, "flush": flush, **options}
        if arrangement == "per_expert":
            pairs = zip(up.unbind(), down.unbind(), strict=True)
            self.experts = nn.ModuleList(Expert(u.clone(), d.clone()) for u, d in pairs)
            self.weights = [e.up_gate_proj.weight for e in self.experts]
            self.weights += [e.down_proj.weight for e in self.experts]
        else:
            self.weights = [nn.Parameter(up), nn.Parameter(down)]
        self.node = self.another_node()
        self.bind(memory)

    def another_node(self, **options):
        """Over the same parameters."""
        options = self.options | options
        if self.arrangement != "per_expert":
            make = getattr(SonicMoEMlpNode, f"from_{self.arrangement}")
            return make(*self.weights, **options)
        return SonicMoEMlpNode(self.experts, *self.setup.sizes[:3], **options)

    def bind(self, memory):
        """`main_grad` full of zeros ("own"), or "none": the backward makes it."""
        for weight in self.weights:
            zeros = torch.zeros(weight.shape, device=self.setup.device)
            weight.main_grad = None if memory == "none" else spelled(zeros)

    def clear(self):
        """What an optimizer does after its step."""
        for weight in self.weights:
            weight.main_grad.zero_()

    @property
    def main_grads(self):
        return [weight.main_grad for weight in self.weights]

    def batch(self, seed=0, tokens=None):
        """x, indices, probs, dout; one expert has no token."""
        experts, hidden, _, topk = self.setup.sizes
        tokens = tokens or self.setup.tokens + 7 * seed
        generator = torch.Generator().manual_seed(100 + seed)
        scores = torch.rand((tokens, experts), generator=generator)
        scores[:, experts // 2] = -1.0
        indices = scores.topk(topk, 1).indices
        indices[torch.rand((tokens, topk), generator=generator) < 0.3] = -1
        x, dout = (
            torch.randn(tokens, hidden, generator=generator).to(self.setup.device, self.setup.dtype)
            for _ in range(2)
        )
        probs = torch.rand((tokens, topk), generator=generator) + 0.05
        indices, probs = indices.to(self.setup.device), probs.to(self.setup.device)
        return x.requires_grad_(), indices, probs.requires_grad_(), dout

    def run(self, batch, *, node=None):
        """`[out, dx, dprobs]` of one micro-batch."""
        x, indices, probs, dout = batch
        x, probs = (leaf.detach().requires_grad_() for leaf in (x, probs))
        out = (node or self.node)(x, None, indices, probs)
        out.backward(dout)
        return [out.detach(), x.grad, probs.grad]

    def step(self, *seeds, **options):
        """Results of every micro-batch and, after `node.step()`, copies of every gradient."""
        results = [tensor for seed in seeds for tensor in self.run(self.batch(seed), **options)]
        self.node.step()
        return results + [gradient.clone() for gradient in self.main_grads]

    def check_strangers(self):
        assert not any(map(written_beside, self.main_grads))


def assert_same_bits(actual, wanted, what=None):
    for index, (got, want) in enumerate(zip(actual, wanted, strict=True)):
        assert torch.equal(got, want), (what, index)


def relative(actual, wanted):
    actual, wanted = actual.detach().double(), wanted.detach().double()
    return float((actual - wanted).norm() / wanted.norm().clamp(min=1e-300))
