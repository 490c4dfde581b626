"""`MoE` on a GPU engine under `torch.compile` and in a CUDA graph: the eager layer's numbers, and never stale weights."""

from __future__ import annotations

import pytest
import torch

from sonicmoe import MoE
from sonicmoe.enums import ActivationType
from sonicmoe.functional.call import make_plan
from sonicmoe.functional.weights import WeightLayout

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(autouse=True)
def needs_a_gpu_engine(request):
    """The reference engine waits for the device: no graph can hold it, and it proves nothing here."""
    use_fp8 = request.node.callspec.params["use_fp8"]
    probe = torch.zeros(1, 256, device="cuda", dtype=torch.bfloat16)
    weights = (probe.new_zeros(1, 256, 256), probe.new_zeros(1, 256, 128), None, None)
    if make_plan(ActivationType.SWIGLU, WeightLayout(), use_fp8).choose(probe, weights).name == "reference":
        pytest.skip("no GPU engine for this precision in this build")


def layer(seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(8, 2, 256, 128, std=0.1).to("cuda", torch.bfloat16)
    with torch.no_grad():
        moe.router.weight.normal_()
    return moe


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, dout = torch.randn(2, tokens, 256, generator=torch.Generator().manual_seed(tokens)).to("cuda", torch.bfloat16)
    return x.contiguous(), dout.contiguous()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def gradients(moe: MoE, forward, x: torch.Tensor, dout: torch.Tensor, use_fp8: bool) -> list[torch.Tensor]:
    """out, dx and every parameter's gradient."""
    x = x.clone().requires_grad_()
    out, _ = forward(x, use_fp8=use_fp8)
    return [out.detach(), *torch.autograd.grad(out, [x, *moe.parameters()], dout)]


@MODES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(use_fp8: bool, backend: str) -> None:
    torch._dynamo.reset()
    moe = layer()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=backend)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2, fused=True)
    for tokens in (300, 129, 1024):
        eager = gradients(moe, moe, *batch(tokens), use_fp8)
        for a, b in zip(gradients(moe, compiled, *batch(tokens), use_fp8), eager, strict=True):
            assert relative(a, b) <= 0.02  # inductor's router may round elsewhere
        for parameter, gradient in zip(moe.parameters(), eager[2:], strict=True):
            parameter.grad = gradient
        optimizer.step()


@MODES
def test_captured_in_a_cuda_graph(use_fp8: bool) -> None:
    """A replay after the weights have changed computes with the new ones."""
    moe, other, (x, dout) = layer(), layer(seed=1), batch(512)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(moe, moe, x, dout, use_fp8)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(moe, moe, x, dout, use_fp8)
    for source in (moe, other):
        with torch.no_grad():
            for mine, its in zip(moe.parameters(), source.parameters(), strict=True):
                mine.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, gradients(source, source, x, dout, use_fp8), strict=True):
            assert torch.equal(a, b)
