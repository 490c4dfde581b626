"""The node on a GPU: the same numbers as on the host, nothing compiled after warm-up, nothing read
that was not written.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import poisoned_allocator
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.jit import no_compile
from sonicmoe.jit_warmup import warmup_jit
from sonicmoe.routing import backends

pytestmark = pytest.mark.gpu

E, H, I, K = 6, 256, 128, 3
MODES = {"plain": SonicMoEConfig(fp8_mode="off"), "fp8": SonicMoEConfig(fp8_mode="perf")}


class Expert(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up_gate_proj, self.down_proj = nn.Module(), nn.Module()
        self.up_gate_proj.weight = nn.Parameter(
            torch.randn(H, 2 * I, generator=generator) * H**-0.5
        )
        self.down_proj.weight = nn.Parameter(torch.randn(I, H, generator=generator) * I**-0.5)
        for parameter in self.parameters():
            parameter.main_grad = None


def batch(tokens: int, seed: int, invalid: float = 0.3):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack(
        [torch.randperm(E, generator=generator)[:K] for _ in range(tokens)] or [torch.zeros(K)]
    ).long()[:tokens]
    dropped = torch.rand(tokens, K, generator=generator) < invalid
    indices[dropped] = torch.where(torch.rand(tokens, K, generator=generator) < 0.5, -1, E)[dropped]
    x, dout = (torch.randn(tokens, H, generator=generator) for _ in range(2))
    return x, indices, torch.rand(tokens, K, generator=generator), dout


def run(device: str, config: SonicMoEConfig, tokens: int, seed: int = 0):
    """out, dx, dprobs and every main_grad of one forward, backward and step."""
    generator = torch.Generator().manual_seed(7)
    experts = nn.ModuleList(Expert(generator) for _ in range(E)).to(device)
    for parameter in experts.parameters():
        parameter.main_grad = None  # `to` may have made new parameters
    node = SonicMoEMlpNode(experts, E, H, I, config=config)
    x, indices, probs, dout = batch(tokens, seed)
    x, probs = x.to(device).requires_grad_(), probs.to(device).requires_grad_()
    out = node(x, None, indices.to(device), probs)
    out.backward(dout.to(device))
    node.step()
    return [
        out.detach(),
        x.grad,
        probs.grad,
        *(parameter.main_grad for parameter in experts.parameters()),
    ]


def relative(actual: torch.Tensor, golden: torch.Tensor) -> float:
    actual, golden = actual.double().cpu(), golden.double().cpu()
    norm = golden.norm()
    return (
        float((actual - golden).norm() / norm)
        if norm > 0
        else float(actual.abs().max())
        if actual.numel()
        else 0.0
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [0, 1, 127, 700])
def test_same_numbers_as_on_the_host(mode: str, tokens: int) -> None:
    # A product summed in another order may cross a rounding boundary of the next quantisation:
    # rare, and one code wide.
    bound = 2e-5 if mode == "plain" else 5e-3
    for on_gpu, on_host in zip(
        run("cuda", MODES[mode], tokens), run("cpu", MODES[mode], tokens), strict=True
    ):
        assert on_gpu.shape == on_host.shape
        assert relative(on_gpu, on_host) <= bound


@pytest.mark.parametrize("mode", MODES)
def test_poisoned_memory_changes_no_bit(mode: str) -> None:
    clean = run("cuda", MODES[mode], 333)
    with poisoned_allocator():
        poisoned = run("cuda", MODES[mode], 333)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)


def test_nothing_compiles_after_warm_up(tmp_path, monkeypatch) -> None:
    """A whole forward, backward and step at several token counts and routings."""
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path))
    backends._choose.cache_clear()  # or kernels loaded by an earlier test would serve
    report = warmup_jit(E, H, I, "cuda")
    assert report.complete
    with no_compile():
        for seed, tokens in enumerate([0, 1, 64, 1000, 4096]):
            for config in MODES.values():
                assert all(bool(torch.isfinite(t).all()) for t in run("cuda", config, tokens, seed))


def test_weights_that_lie_transposed_are_read_as_they_are_now() -> None:
    """Engines read a contiguous copy, made in every forward: what they read in the last one is gone."""
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = (E, H, 2 * I), (E, I, H)
    w1, w2 = (
        nn.Parameter(torch.randn(shape, generator=generator, device="cuda") * shape[1] ** -0.5)
        for shape in shapes
    )
    given = [w.detach().clone() for w in (w1, w2)]
    node = SonicMoEMlpNode.from_fused(w1, w2, config=MODES["fp8"])
    x, indices, probs, _ = (value.to("cuda") for value in batch(64, 5))
    for scale in (1.0, 1.0, 0.5, 0.5):
        for weight, values in zip((w1, w2), given, strict=True):
            weight.data = (values * scale).mT.contiguous().mT
        plain = SonicMoEMlpNode.from_fused(
            *(nn.Parameter(values * scale) for values in given), config=MODES["fp8"]
        )
        with torch.no_grad():
            found, wanted = (n(x.to(torch.bfloat16), None, indices, probs) for n in (node, plain))
        torch.full((1 << 24,), float("nan"), device="cuda")  # over whatever was freed
        assert torch.equal(found, wanted)
