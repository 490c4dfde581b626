"""`torch.compile(fullgraph=True)` of `MoE`: one graph for every batch, checkpointing, and the rules of
operators. That graphs of every face give the eager numbers is in tests/oracle.
"""

from __future__ import annotations

import pytest
import torch._dynamo.testing
from framework import torch
from functional.layer_golden import FP8, MODES, assert_close, batch, make_layer, run_layer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sonicmoe import MoE, SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError, ShapeError
from sonicmoe.layer import plan
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WAYS = pytest.mark.parametrize(
    ("backend", "options"), [("eager", {}), ("aot_eager", FP8)], ids=["eager-fp32", "aot_eager-fp8"]
)


def compiled(layer, backend="aot_eager", **how):
    return torch.compile(layer, fullgraph=True, backend=backend, **how)


def run_compiled(moe, x, dout, called=None, **options):
    """`run_layer` through one graph, of the layer or of what calls it."""
    graph = compiled(called or moe)
    graph.named_parameters = moe.named_parameters
    return run_layer(graph, x, dout, **options)


class Checkpointed(torch.nn.Module):
    """A layer whose forward runs again in backward."""

    def __init__(self, moe, **how):
        super().__init__()
        self.moe, self.how = moe, how

    def forward(self, x, **options):
        return checkpoint(self.moe, x, **self.how, **options)


def test_bf16_and_autocast():
    moe, (x, dout) = make_layer(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        compiled_run, eager_run = run_compiled(moe, x, dout), run_layer(moe, x, dout)
    assert compiled_run[0].dtype == torch.bfloat16
    assert_close(compiled_run, eager_run, 1e-6)


@pytest.mark.parametrize(("options", "selective"), [(FP8, False), ({}, True)])
def test_checkpointing(options, selective, saves):
    """Selective checkpointing names the operator: the experts are kept, the rest is computed again."""

    def policy(_, operator, *arguments, **keywords):
        keep = operator is torch.ops.sonicmoe.expert_mlp.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    how = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
    moe, (x, dout) = make_layer(bias=True), batch()
    expected = run_layer(moe, x, dout, **options)
    saves.clear()
    called = Checkpointed(moe, use_reentrant=False, **how)
    assert_close(run_compiled(moe, x, dout, called, **options), expected, 1e-6)
    assert len(saves) == (1 if selective else 2)


@MODES
def test_one_graph_serves_every_batch(options):
    moe, counter = make_layer(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = compiled(moe, counter, dynamic=True)
    for count in (19, 64, 200, 7):
        x, _ = batch(count)
        assert torch.equal(layer(x, **options)[0], moe(x, **options)[0])
    assert counter.frame_count == 1


def test_every_layer_of_a_deep_model_uses_its_own_weights():
    """And its own activation. Layers share one code object, and past the compiler's limit of graphs per
    code object a full graph is refused.
    """
    kinds = [ActivationType.GEGLU, ActivationType.RELU_SQ] * 4
    layers = [make_layer(kind, seed=seed) for seed, kind in enumerate(kinds)]
    layers += [MoE(5, 2, 32, 24, "swiglu_oai", std=0.5, activation_parameters={"limit": 0.5})]
    graphs = [compiled(layer, dynamic=True) for layer in layers]
    x, _ = batch()
    for _ in range(2):
        for layer, graph in zip(layers, graphs, strict=True):
            assert torch.equal(graph(x, **FP8)[0], layer(x, **FP8)[0])


@WAYS
def test_inference_mode_cuts_the_graph_where_the_eager_layer_does(backend, options, saves):
    moe, (x, _) = make_layer(), batch()
    layer, x = compiled(moe, backend), x.requires_grad_()
    (out, aux), (expected, expected_aux) = (
        f(x, is_inference_mode=True, **options) for f in (layer, moe)
    )
    assert saves == [False, False] and not out.requires_grad and not expected.requires_grad
    assert torch.equal(out, expected) and aux is None and expected_aux is None


# Settings


def test_another_configuration_is_not_ignored():
    moe, (x, _) = make_layer(), batch()
    layer = compiled(moe)
    expected = layer(x)[0]
    with (
        pytest.raises(ConfigError, match="not the one this graph was compiled under"),
        SonicMoEConfig(fp8_mode="perf").activate(),
    ):
        layer(x)
    assert torch.equal(layer(x)[0], expected)


def test_the_argument_beats_the_configuration_in_graphs_too():
    moe, (x, _) = make_layer(), batch()
    layer = compiled(moe)
    with SonicMoEConfig(fp8_mode="perf", save_z="e4m3").activate():
        assert torch.equal(layer(x, use_fp8=False)[0], moe(x, use_fp8=False)[0])
        assert torch.equal(layer(x, use_fp8=True)[0], moe(x, use_fp8=True)[0])
        assert not torch.equal(layer(x, use_fp8=True)[0], layer(x, use_fp8=False)[0])


def test_border_checks_speak_while_compiling():
    layer = compiled(make_layer())
    with pytest.raises(
        (ShapeError, torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported),
        match="needed",
    ):
        layer(torch.zeros(3, 31))


def test_an_exported_program_in_another_process_says_what_it_lacks(monkeypatch):
    """Settings are known where a layer was traced; a program that was loaded from a file names them
    only.
    """
    moe, (x, _) = make_layer(), batch()
    program = torch.export.export(moe, (x,)).module()
    expected = program(x)[0]
    monkeypatch.setattr(plan, "_plans", {})  # as in a new process
    with pytest.raises(
        ConfigError, match=r"no plan \d+ in this process: .* trace the layer once here before"
    ):
        program(x)
    torch.compile(make_layer(seed=5), backend="eager")(x)
    assert torch.equal(program(x)[0], expected)


# Operators


def operator_inputs(options, save=True, trained=True, apart=False):
    moe, (x, _) = make_layer(bias=True), batch()
    indices = (
        torch.rand(19, 8, generator=torch.Generator().manual_seed(3)).topk(2).indices - 1
    )  # -1 to 6, of 5 experts
    probs = torch.rand(19, 2, generator=torch.Generator().manual_seed(4)).requires_grad_(trained)
    layout = WeightLayout(split_half=apart, apart=apart)
    plan = make_plan(ActivationType.SWIGLU, layout, options.get("use_fp8"))
    w1 = moe.c_fc.weight, None
    if apart:
        w1 = map(torch.nn.Parameter, layout.user_w1(moe.c_fc.weight.detach()))
    weights = *w1, moe.c_proj.weight, None, moe.c_fc.bias, moe.c_proj.bias
    low_rank = (*[None] * 4, 0.0, 0.0)
    return (x.requires_grad_(trained), indices, probs, *weights, *low_rank, number_of(plan), save)


@MODES
@pytest.mark.parametrize("apart", [False, True])
def test_operators_keep_the_rules_of_the_library(options, apart):
    """Schema, fake tensors, autograd registration, and traced gradients against eager ones,
    sentinels included.
    """
    inputs = operator_inputs(options, apart=apart)
    torch.library.opcheck(torch.ops.sonicmoe.expert_mlp.default, inputs)
