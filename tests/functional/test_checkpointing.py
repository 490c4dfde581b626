"""Activation checkpointing around `MoE`: the same bits, forward run again, in eager and in compiled
graphs.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.layer_golden import (
    AUX_WEIGHT,
    FP8,
    MODES,
    assert_close,
    assert_same_bits,
    batch,
    make_layer,
    run_layer,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sonicmoe import SonicMoEConfig


class Checkpointed(torch.nn.Module):
    """A layer whose forward runs again in backward."""

    def __init__(self, moe, **how):
        super().__init__()
        self.moe, self.how = moe, how

    def forward(self, x, **options):
        return checkpoint(self.moe, x, **self.how, **options)

    def named_parameters(self, *_, **__):
        return self.moe.named_parameters()


@MODES
@pytest.mark.parametrize("reentrant", [False, True])
def test_forward_runs_again_with_the_same_bits(reentrant, options, saves):
    """The first forward of the re-entrant kind runs without autograd, and keeps nothing."""
    moe, (x, dout) = make_layer(bias=True), batch()
    expected = run_layer(moe, x, dout, **options)
    saves.clear()
    layer = Checkpointed(lambda h: moe(h, **options), use_reentrant=reentrant)
    leaf = x.clone().requires_grad_()
    out, aux = layer(leaf)
    ((out * dout).sum() + AUX_WEIGHT * aux).backward()
    assert saves == [not reentrant, True]
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    assert_same_bits((out.detach(), aux.detach(), {"x": leaf.grad, **gradients}), expected)


def test_under_an_activated_configuration():
    moe, (x, dout) = make_layer(), batch()
    with SonicMoEConfig(fp8_mode="perf", save_z="e4m3").activate():
        expected = run_layer(moe, x, dout)
        assert_same_bits(run_layer(Checkpointed(moe, use_reentrant=False), x, dout), expected)


@pytest.mark.parametrize(("options", "selective"), [(FP8, False), ({}, True)])
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
