"""Activation checkpointing around `MoE`: the same bits, forward run again, in eager and in compiled
graphs.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.layer_golden import (
    AUX_WEIGHT,
    assert_close,
    assert_same_bits,
    make_layer,
    make_tokens,
    run_layer,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sonicmoe import SonicMoEConfig

MODES = pytest.mark.parametrize("options", [{}, {"use_fp8": True}], ids=["fp32", "fp8"])


class Checkpointed(torch.nn.Module):
    """A layer whose forward runs again in backward."""

    def __init__(self, moe, **how):
        super().__init__()
        self.moe, self.how = moe, how

    def forward(self, x, **options):
        return checkpoint(self.moe, x, **self.how, **options)

    def named_parameters(self, *_, **__):
        return self.moe.named_parameters()


def batch():
    return make_tokens(19, 32), make_tokens(19, 32, seed=2)


@MODES
def test_forward_runs_again_with_the_same_bits(options, saves):
    moe, (x, dout) = make_layer(bias=True), batch()
    expected = run_layer(moe, x, dout, **options)
    saves.clear()
    assert_same_bits(
        run_layer(Checkpointed(moe, use_reentrant=False), x, dout, **options), expected
    )
    assert saves == [True, True]


def test_reentrant(saves):
    """Its first forward runs without autograd, and keeps nothing."""
    moe, (x, dout) = make_layer(), batch()
    out, aux, gradients = run_layer(moe, x, dout)
    saves.clear()
    again, x = make_layer(), x.clone().requires_grad_()
    found, found_aux = checkpoint(again, x, use_reentrant=True)
    ((found * dout).sum() + AUX_WEIGHT * found_aux).backward()
    assert saves == [False, True]
    assert (
        torch.equal(found, out)
        and torch.equal(found_aux, aux)
        and torch.equal(x.grad, gradients["x"])
    )
    assert all(
        torch.equal(parameter.grad, gradients[name]) for name, parameter in again.named_parameters()
    )


def test_under_an_activated_configuration():
    moe, (x, dout) = make_layer(), batch()
    with SonicMoEConfig(fp8_mode="perf", save_z="e4m3").activate():
        expected = run_layer(moe, x, dout)
        assert_same_bits(run_layer(Checkpointed(moe, use_reentrant=False), x, dout), expected)


@MODES
@pytest.mark.parametrize("selective", [False, True])
def test_in_a_compiled_graph(options, selective, saves):
    """Selective checkpointing names the operator: the experts are kept, the rest is computed again."""

    def policy(_, operator, *arguments, **keywords):
        keep = operator is torch.ops.sonicmoe.expert_mlp.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    how = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
    moe, (x, dout) = make_layer(bias=True), batch()
    expected = run_layer(moe, x, dout, **options)
    torch._dynamo.reset()
    graph = torch.compile(
        Checkpointed(moe, use_reentrant=False, **how), fullgraph=True, backend="aot_eager"
    )
    saves.clear()
    x = x.clone().requires_grad_()
    out, aux = graph(x, **options)
    named = {"x": x, **dict(moe.named_parameters())}
    gradients = torch.autograd.grad((out * dout).sum() + AUX_WEIGHT * aux, list(named.values()))
    assert_close(
        (out.detach(), aux.detach(), dict(zip(named, gradients, strict=True))), expected, 1e-6
    )
    assert len(saves) == (1 if selective else 2)
