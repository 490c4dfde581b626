"""Experts frozen as FP8 codes on a GPU engine: the bits of weights that have the same codes, and CUDA
graphs of LoRA over them, forward and backward.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import DEVICE, captured, raw
from node.direct_layers import assert_same_bits

from sonicmoe import Adapters, LowRank, MoE
from sonicmoe.integrations.frozen import freeze_experts
from sonicmoe.observe import observing
from sonicmoe.quant.recipes import ScaleFormat
from sonicmoe.weights import frozen

pytestmark = pytest.mark.gpu

E, H, I, TOKENS, RANK = 8, 512, 512, 256, 12
BF16 = torch.bfloat16
SPARE = 1 << 20  # bytes; codes of the smaller projection are two of them


class Step:
    """A layer with frozen weights and trained pairs beside them, on a batch of its own. `step()` gives
    its output and every gradient.
    """

    def __init__(self, layer, seed, biases, shapes, axes=(2, 1)):
        """biases: of the layer, trained. shapes, axes: of both weights, and where their inputs and
        outputs are.
        """
        generator = torch.Generator().manual_seed(10 + seed)

        def drawn(*sizes, scale=1.0):
            made = scale * torch.randn(sizes, generator=generator)
            return made.to(DEVICE, BF16).requires_grad_()

        self.layer, self.biases, self.pairs = layer, biases, []
        for parameter in layer.parameters():
            if parameter.dim() == 3:  # weights of experts, which nobody trains here
                parameter.requires_grad_(False)
        for shape in shapes:
            inputs, outputs = (shape[axis] for axis in axes)
            a, b = drawn(E, RANK, inputs, scale=inputs**-0.5), drawn(E, outputs, RANK, scale=0.1)
            self.pairs.append(LowRank(a, b, 0.5))
        self.x, self.dout = drawn(TOKENS, H), drawn(TOKENS, H).detach()
        self.ids = torch.rand(TOKENS, E, generator=generator).argsort(1)[:, :2].to(DEVICE)
        self.scores = torch.rand(TOKENS, 2, generator=generator).to(DEVICE).requires_grad_()

    @property
    def written(self):
        """What a training loop writes between two replays, and a loader."""
        factors = [factor for pair in self.pairs for factor in pair[:2]]
        given = [self.x, self.dout, self.ids, self.scores]
        return [*factors, *self.layer.parameters(), *given]

    def __call__(self):
        out, wanted = self.forward()
        wanted = [self.x, *wanted, *self.biases, *[f for pair in self.pairs for f in pair[:2]]]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.dout)]


class OfMoE(Step):
    """`MoE`, whose router trains."""

    def __init__(self, seed, frozen=True):
        torch.manual_seed(seed)
        layer = MoE(E, 2, H, I, add_bias=True, std=0.05)
        with torch.no_grad():
            layer.router.weight.normal_()
            for part in (layer.c_fc, layer.c_proj):
                part.bias.normal_(0.0, 0.3)
        layer = layer.to(BF16)
        if frozen:
            freeze_experts(layer)
        layer.to(DEVICE)
        shapes = (E, 2 * I, H), (E, H, I)
        super().__init__(layer, seed, [layer.c_fc.bias, layer.c_proj.bias], shapes)

    def forward(self):
        out, _ = self.layer(self.x, adapters=Adapters(*self.pairs), use_fp8=True)
        return out, [self.layer.router.weight]


class OfTransformers(Step):
    """Experts of a transformers model; those of gpt-oss are transposed and have biases."""

    def __init__(self, seed, family, frozen=True):
        pytest.importorskip("transformers", minversion="5.7")
        from integrations.hf_models import FAMILIES, build

        from sonicmoe.integrations.transformers import register

        register()
        config = FAMILIES[family](1)
        config.hidden_size, config.intermediate_size, config.moe_intermediate_size = H, I, I
        for name in ("num_experts", "num_local_experts"):
            if hasattr(config, name):
                setattr(config, name, E)
        layer = build(config, "sonicmoe_fp8", seed).to(BF16).model.layers[0].mlp.experts
        if frozen:
            freeze_experts(layer)
        layer.to(DEVICE)
        biases = [p for name, p in layer.named_parameters() if name.endswith("bias")]
        axes = (1, 2) if getattr(layer, "is_transposed", False) else (2, 1)
        shapes = layer.gate_up_proj.shape, layer.down_proj.shape
        super().__init__(layer, seed, biases, shapes, axes)

    def forward(self):
        adapters = dict(zip(("gate_up_proj", "down_proj"), self.pairs, strict=True))
        return self.layer(self.x, self.ids, self.scores, adapters=adapters), [self.scores]


def qwen3(seed, frozen=True):
    return OfTransformers(seed, "qwen3-moe", frozen)


def gpt_oss(seed, frozen=True):
    return OfTransformers(seed, "gpt-oss", frozen)


FACES = pytest.mark.parametrize("face", [OfMoE, qwen3, gpt_oss])


@FACES
def test_the_bits_of_weights_that_have_the_same_codes(face, monkeypatch):
    # As the engine makes codes of weights that it has.
    monkeypatch.setattr(frozen, "_FORMATS", (ScaleFormat.FP32,))
    codes, values, engines = face(0), face(0, frozen=False), set()
    with observing(lambda event: engines.add(event.call.engine)):
        found = codes()
    assert engines == {"hopper"}
    assert_same_bits(found, values())
    # A GPU makes the codes of a CPU.
    freeze_experts(values.layer)
    one, other = codes.layer.state_dict(), values.layer.state_dict()
    assert one.keys() == other.keys()
    assert_same_bits(map(raw, one.values()), map(raw, other.values()))


@FACES
def test_captured_in_a_cuda_graph(face):
    """A replay computes with the factors, the biases and the codes that are there by then; and the
    graph holds no transposed codes, which each backward makes in memory of the graph.
    """
    step, other = face(0), face(1)

    def warm():
        for _ in range(3):
            step()

    captured(lambda: torch.zeros(1, device=DEVICE))  # what the first capture of a process allocates
    before = torch.cuda.memory_allocated()
    graph, results = captured(step, warm)
    if not isinstance(step, OfMoE):  # whose router may hold workspaces of matrix products
        held = torch.cuda.memory_allocated() - before
        assert held <= sum(result.nbytes for result in results) + SPARE, held
    for source in (face(0), other):
        with torch.no_grad():
            for mine, its in zip(step.written, source.written, strict=True):
                mine.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, source())
