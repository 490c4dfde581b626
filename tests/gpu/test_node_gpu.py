"""The node on a GPU: the same numbers as on the host, and nothing read that was not written."""

from __future__ import annotations

import pytest
import torch
from gpu.device import poisoned_allocator
from node.direct_layers import DirectLayer, Setup, assert_same_bits, relative
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

pytestmark = pytest.mark.gpu

E, H, I, K = 6, 256, 128, 3
MODES = {"plain": SonicMoEConfig(fp8_mode="off"), "fp8": SonicMoEConfig(fp8_mode="perf")}


def run(device: str, mode: str, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """out, dx, dprobs and every main_grad of one forward, backward and step, on the host."""
    setup = Setup(MODES[mode], device, torch.float32, (E, H, I, K))
    layer = DirectLayer(setup, memory="none")
    # Sliced, because a layer's own batches have at least one token.
    results = layer.run([tensor.detach()[:tokens] for tensor in layer.batch(seed, tokens + 1)])
    assert layer.node.gradient_bytes == 0
    layer.node.step()
    return [tensor.cpu() for tensor in (*results, *layer.main_grads)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [0, 1, 127, 700])
def test_same_numbers_as_on_the_host(mode: str, tokens: int) -> None:
    # A product summed in another order may cross a rounding boundary of the next quantisation:
    # rare, and one code wide.
    bound = 2e-5 if mode == "plain" else 5e-3
    for on_gpu, on_host in zip(run("cuda", mode, tokens), run("cpu", mode, tokens), strict=True):
        assert on_gpu.shape == on_host.shape
        assert relative(on_gpu, on_host) <= bound


@pytest.mark.parametrize("mode", MODES)
def test_poisoned_memory_changes_no_bit(mode: str) -> None:
    clean = run("cuda", mode, 333)
    with poisoned_allocator():
        assert_same_bits(run("cuda", mode, 333), clean)


def test_weights_that_lie_transposed_are_read_as_they_are_now() -> None:
    """Engines read a contiguous copy, made in every forward: what they read in the last one is gone."""
    setup = Setup(MODES["fp8"], "cuda", torch.float32, (E, H, I, K))
    layer = DirectLayer(setup, "fused")
    given = [weight.detach().clone() for weight in layer.weights]
    x, indices, probs, _ = layer.batch(5, 64)
    for scale in (1.0, 1.0, 0.5, 0.5):
        for weight, values in zip(layer.weights, given, strict=True):
            weight.data = (values * scale).mT.contiguous().mT
        scaled = [nn.Parameter(values * scale) for values in given]
        plain = SonicMoEMlpNode.from_fused(*scaled, config=MODES["fp8"])
        with torch.no_grad():
            nodes = (layer.node, plain)
            found, wanted = (n(x.to(torch.bfloat16), None, indices, probs) for n in nodes)
        torch.full((1 << 24,), float("nan"), device="cuda")  # over whatever was freed
        assert torch.equal(found, wanted)
