"""`MoE` on a GPU engine, compiled, checkpointed and in a CUDA graph: the same numbers, and never stale
weights. Other faces have test_oracle_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import captured
from node.direct_layers import assert_same_bits, relative
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])


def layer(seed=0, dtype=torch.bfloat16) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(8, 2, 256, 128, std=0.1).to("cuda", dtype)
    with torch.no_grad():
        moe.router.weight.normal_()
    return moe


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, dout = torch.randn(2, tokens, 256, generator=generator).to("cuda", torch.bfloat16)
    return x.contiguous(), dout.contiguous()


def gradients(
    moe: MoE, forward, x: torch.Tensor, dout: torch.Tensor, use_fp8: bool
) -> list[torch.Tensor]:
    """out, dx and every parameter's gradient."""
    x = x.clone().requires_grad_()
    out, _ = forward(x, use_fp8=use_fp8)
    return [out.detach(), *torch.autograd.grad(out, [x, *moe.parameters()], dout)]


@MODES
def test_compiled(use_fp8: bool) -> None:
    torch._dynamo.reset()
    moe = layer()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
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

    def step():
        return gradients(moe, moe, x, dout, use_fp8)

    graph, results = captured(step, lambda: (step(), step(), step()))
    for source in (moe, other):
        with torch.no_grad():
            for mine, its in zip(moe.parameters(), source.parameters(), strict=True):
                mine.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, gradients(source, source, x, dout, use_fp8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_hold_one_order_of_codes(reentrant: bool) -> None:
    """The bits are those of layers that hold both."""
    order = 8 * (2 * 128 + 128) * 256  # bytes of a layer's codes

    def after_a_step(wrap) -> tuple[list[torch.Tensor], int]:
        layers, (x, dout) = [layer(seed) for seed in range(6)], batch(512)
        leaf = hidden = x.clone().requires_grad_()
        for moe in layers:
            hidden = wrap(lambda h, moe=moe: moe(h, use_fp8=True)[0], hidden)
        hidden.backward(dout)
        del hidden  # whose graph has the codes, too
        found = [leaf.grad, *(weight.grad for moe in layers for weight in moe.parameters())]
        held = torch.cuda.memory_allocated()
        for moe in layers:
            moe.invalidate_caches()
        return found, round((held - torch.cuda.memory_allocated()) / order)

    wanted, both = after_a_step(lambda forward, x: forward(x))
    found, one = after_a_step(lambda forward, x: checkpoint(forward, x, use_reentrant=reentrant))
    assert_same_bits(found, wanted)
    assert (one, both) == (6, 12)


def test_a_graph_that_reads_one_order_hides_no_write_from_the_other() -> None:
    """It was captured before there was a backward, and finds a write, which leaves no trace, first."""
    moe, other, (x, dout) = layer(), layer(seed=1), batch(512)
    with torch.no_grad():
        graph, (out, _) = captured(lambda: moe(x, use_fp8=True), lambda: moe(x, use_fp8=True))
    gradients(moe, moe, x, dout, use_fp8=True)
    for mine, its in zip(moe.parameters(), other.parameters(), strict=True):
        mine.data.copy_(its)
    graph.replay()
    wanted = gradients(other, other, x, dout, use_fp8=True)
    assert_same_bits([out], wanted[:1])
    assert_same_bits(gradients(moe, moe, x, dout, use_fp8=True), wanted)
