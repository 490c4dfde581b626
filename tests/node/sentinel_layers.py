"""Deep, hot and nearly idle: 48 layers of nodes on a rank that holds an eighth of the experts, 99
of 100 tokens without any of them.

What a rank of an expert-parallel group of eight sees at its worst. NaN that leaks through one
invalid slot reaches the loss, the router or a weight within a few optimizer steps, and every byte
of memory that the framework hands out is NaN beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from node.direct_layers import Expert
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.ernie_compat import SonicMoEMlpNode

GROUP = 8  # ranks that share the experts
IDLE = 5  # the local expert that no token ever picks
UNTOUCHED = 7.0  # what waits in its main_grad


@dataclass(frozen=True)
class Scenario:
    """Sizes of the stack on one rank, `experts` being the local ones; `served` tokens of `tokens`
    have a valid slot in a layer.
    """

    config: SonicMoEConfig
    device: str = "cuda"
    layers: int = 48
    tokens: int = 2048
    hidden: int = 512
    intermediate: int = 384
    experts: int = 8
    topk: int = 4
    steps: int = 6
    lr: float = 2e-3

    @property
    def served(self) -> int:
        return max(1, self.tokens // 100)


@dataclass
class Trace:
    """Of one training run: the losses, every tensor that a step made by its name, and the tensors
    as they are after the last step.
    """

    losses: list[float] = field(default_factory=list)
    made: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    left: dict[str, torch.Tensor] = field(default_factory=dict)


def make_expert(scenario: Scenario, generator: torch.Generator) -> Expert:
    """fp32 master weights in ERNIE's arrangement, each with a private `main_grad`."""
    hidden, inner = scenario.hidden, scenario.intermediate
    up, down = (
        torch.randn(shape, generator=generator, device=scenario.device) * shape[0] ** -0.5
        for shape in ((hidden, 2 * inner), (inner, hidden))
    )
    expert = Expert(up, down)
    for weight in expert.parameters():
        weight.main_grad = torch.zeros_like(weight)
    return expert


class Layer(nn.Module):
    """Norm, a gate that learns through the probabilities, the rank's experts, and the residual."""

    def __init__(self, scenario: Scenario, generator: torch.Generator) -> None:
        super().__init__()
        made = (make_expert(scenario, generator) for _ in range(scenario.experts))
        self.experts = nn.ModuleList(made)
        sizes = scenario.experts, scenario.hidden, scenario.intermediate
        self.node = SonicMoEMlpNode(self.experts, *sizes, config=scenario.config)
        self.gate = nn.Parameter(
            torch.randn(scenario.hidden, generator=generator, device=scenario.device)
        )
        self.bias = nn.Parameter(torch.linspace(-1, 1, scenario.topk, device=scenario.device))
        self.indices = draw_indices(scenario, generator)

    @property
    def invalid(self) -> torch.Tensor:
        return (self.indices < 0) | (self.indices >= len(self.experts))

    def forward(self, h: torch.Tensor, watch: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        # Probabilities of invalid slots are not zero: some dispatchers leave them so.
        probs = torch.sigmoid((normed * self.gate).mean(-1, keepdim=True) + self.bias)
        x = normed.to(torch.bfloat16)
        out = self.node(x, None, self.indices, probs)
        if h.requires_grad:
            watch("out", out.detach())
            x.register_hook(lambda dx: watch("dx", dx))
            probs.register_hook(lambda dprobs: watch("dprobs", dprobs))
        return h + out.to(torch.float32)


def draw_indices(scenario: Scenario, generator: torch.Generator) -> torch.Tensor:
    """int64 `[T, K]`: `served` tokens with one valid slot or more, all others without; both
    sentinels everywhere.
    """
    assert scenario.topk < scenario.experts, "some slot would have to pick the idle expert"
    size, device = (scenario.tokens, scenario.topk), scenario.device
    scores = torch.rand((scenario.tokens, scenario.experts), generator=generator, device=device)
    scores[:, IDLE % scenario.experts] = -1.0
    here = scores.topk(scenario.topk, 1).indices
    foreign = torch.randint(
        scenario.experts, GROUP * scenario.experts, size, generator=generator, device=device
    )
    absent = torch.where(torch.rand(size, generator=generator, device=device) < 0.5, -1, foreign)
    valid = torch.rand(size, generator=generator, device=device) < 1 / scenario.topk
    valid[:, scenario.topk // 2] = True
    order = torch.rand(scenario.tokens, generator=generator, device=device).argsort()
    valid[order[scenario.served :]] = False
    return torch.where(valid, here, absent)


def train(scenario: Scenario, before_step: Callable[[], None] = lambda: None) -> Trace:
    """Train the stack from one seed to move the served tokens towards a fixed target; asserts at
    every step what must hold.
    """
    generator = torch.Generator(scenario.device).manual_seed(11)
    layers = nn.ModuleList(Layer(scenario, generator) for _ in range(scenario.layers))
    x, target = (
        torch.randn((scenario.tokens, scenario.hidden), generator=generator, device=scenario.device)
        for _ in range(2)
    )
    served = torch.stack([(~layer.invalid).any(1) for layer in layers]).any(0).to(torch.float32)
    parameters = dict(layers.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=scenario.lr, weight_decay=0.0, fused=scenario.device != "cpu"
    )
    idle = {
        name: p.detach().clone()
        for name, p in parameters.items()
        if f"experts.{IDLE % scenario.experts}." in name
    }
    trace, x = Trace(), x.requires_grad_()
    for _ in range(scenario.steps):
        before_step()
        h, mark = x, len(trace.made)
        for layer in layers:
            h = layer(h, lambda name, tensor: trace.made.append((name, tensor)))
        for name in idle:
            parameters[name].main_grad.fill_(UNTOUCHED)
        # Times zero, not left out: NaN in a token that nobody serves shows too.
        loss = ((h - target).square().mean(1) * served).sum() / served.sum()
        loss.backward()
        for layer in layers:
            layer.node.step()
        trace.losses.append(float(loss.detach()))
        check_step(layers, dict(parameters), idle, trace.made[mark:], x.grad)
        for name, parameter in parameters.items():
            if name in idle:
                parameter.main_grad.zero_()
            if hasattr(parameter, "main_grad"):
                parameter.grad = parameter.main_grad
        trace.left = {f"gradient of {name}": p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        x.grad = None
    for name, before in idle.items():
        assert torch.equal(parameters[name], before), f"{name} moved without a token"
    trace.left |= {name: p.detach() for name, p in parameters.items()}
    assert_finite(trace.left)
    return trace


def check_step(layers, parameters, idle, made, dx) -> None:
    """Everything is finite, what nobody computed is zero, and what nobody touched is as it was."""
    assert_finite({f"{name} {number}": tensor for number, (name, tensor) in enumerate(made)})
    gradients = {name: getattr(p, "main_grad", p.grad) for name, p in parameters.items()}
    assert_finite({f"gradient of {name}": held for name, held in gradients.items()} | {"dx": dx})
    by_name = {
        name: [tensor for found, tensor in made if found == name]
        for name in ("out", "dx", "dprobs")
    }
    assert {len(tensors) for tensors in by_name.values()} == {len(layers)}
    backwards = reversed(by_name["dx"]), reversed(by_name["dprobs"])
    leaks = []
    for layer, out, dx_rows, dprobs in zip(layers, by_name["out"], *backwards, strict=True):
        alone = layer.invalid.all(1)
        leaks += [out[alone].any(), dx_rows[alone].any(), dprobs[layer.invalid].any()]
        leaks += [~dprobs[~layer.invalid].any()]  # and the gate does learn
    assert not bool(torch.stack(leaks).any()), torch.stack(leaks).nonzero().flatten().tolist()
    for name in idle:
        assert bool((gradients[name] == UNTOUCHED).all()), f"main_grad of {name} was touched"


def assert_finite(tensors: dict[str, torch.Tensor]) -> None:
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()]).tolist()
    bad = [name for name, good in zip(tensors, finite, strict=True) if not good]
    assert not bad, f"{len(bad)} of {len(tensors)} are not finite: {bad[:5]}"


def assert_same_bits(one: Trace, other: Trace) -> None:
    """Every tensor of every step, and the weights and gradients that the last one left."""
    assert one.losses == other.losses
    pairs = [(name, a, b) for (name, a), (_, b) in zip(one.made, other.made, strict=True)]
    pairs += [(name, tensor, other.left[name]) for name, tensor in one.left.items()]
    differing = [name for name, a, b in pairs if not torch.equal(a, b)]
    assert not differing, f"{len(differing)} of {len(pairs)} differ: {differing[:5]}"


def train_twice(scenario: Scenario) -> tuple[Trace, Trace]:
    """In clean memory, then in memory full of NaN; on a GPU what earlier tensors freed is
    overwritten before every step too.
    """
    traces = []
    for nan in (False, True):
        overwrite = partial(overwrite_free_memory, 0xFF if nan else 0, scenario.device)
        with memory_full_of_nan(scenario.device, nan):
            traces.append(train(scenario, overwrite))
    return traces[0], traces[1]


def overwrite_free_memory(byte: int, device: str) -> None:
    if device == "cuda":
        from gpu.device import fill_free_memory

        fill_free_memory(byte)


CONFIGS = {  # by name: a fallback would prove nothing
    "hopper": SonicMoEConfig(fp8_mode="perf", engine="hopper"),
    "bf16": SonicMoEConfig(fp8_mode="off", engine="bf16"),
    "reference": SonicMoEConfig(fp8_mode="perf", engine="reference"),
}
