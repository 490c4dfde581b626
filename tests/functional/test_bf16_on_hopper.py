"""The faces over engine `bf16` on Hopper, whose GEMMs are computed on the host: whose memory a backward
takes, and weights that are read where they lie. engine/test_oracle_on_host.py has all numbers.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from engine.bf16_host import HOPPER, launches_fixture  # noqa: F401
from engine.host_hopper_gemms import HopperGemms
from weights.weight_sources import expert_modules

from sonicmoe import SonicMoEConfig
from sonicmoe.engine import bf16_sm90
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.bf16_sm90 import Bf16Layer
from sonicmoe.engine.interface import GradientMode, GradientTargets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import EngineChoice
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.layer import plan
from sonicmoe.layouts import WeightLayout

E, H, I, K, T = 4, 64, 40, 2, 50
LAYOUTS = [WeightLayout(*flags) for flags in itertools.product((False, True), repeat=2)]

pytestmark = pytest.mark.parametrize("launches", [HOPPER], indirect=True)


@pytest.fixture
def on(launches, monkeypatch):
    """Runs a step on an engine, whatever the configuration says; notes the targets of gradients."""
    targets = []
    add = Bf16Engine.backward_dw

    def noted(self, pending, given):
        targets.append(given.mode)
        add(self, pending, given)

    monkeypatch.setattr(Bf16Engine, "backward_dw", noted)

    def run(engine, step):
        chosen = EngineChoice(engine, "a test")
        monkeypatch.setattr(plan, "ready_engine", lambda *_: chosen)
        targets.clear()
        return step(), list(targets)

    return run


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, E, generator=generator)
    scores[:, 1] = -1.0  # an expert without tokens
    x, dout = torch.randn(2, T, H, generator=generator).bfloat16()
    probs = torch.rand(T, K, generator=generator)
    return x.requires_grad_(), scores.topk(K, 1).indices, probs.requires_grad_(), dout


def parameters(layout, bias=False):
    generator = torch.Generator().manual_seed(1)
    shapes = (2 * I, H), (H, I)
    shapes = [(E, *(shape[::-1] if layout.transposed else shape)) for shape in shapes]
    weights = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]
    biases = [torch.randn(E, size, generator=generator) * 0.1 for size in (2 * I, H)]
    tensors = [*weights, *(biases if bias else (None, None))]
    return [None if t is None else torch.nn.Parameter(t.bfloat16()) for t in tensors]


def test_dz_takes_the_memory_of_z_where_no_backward_follows(on, monkeypatch):
    """With `retain_graph` z stays for the next one, which gives the same bits. Else it is free when
    memory for dw2 is taken, although autograd holds it.
    """
    shared, free, dgated, take_down = [], [], Bf16Layer.dgated, GradientTargets.take_down

    def noted(self, dout, z, operands, *others):
        shared.append(operands[0] is z)
        free.append(z.untyped_storage())
        return dgated(self, dout, z, operands, *others)

    def taken(targets):
        free[-1] = free[-1].nbytes() == 0
        take_down(targets)

    monkeypatch.setattr(GradientTargets, "take_down", taken)
    monkeypatch.setattr(Bf16Layer, "dgated", noted)

    def step():
        x, indices, probs, dout = batch()
        own = parameters(LAYOUTS[3], True)
        leaves = (x, probs, *own)
        out = expert_mlp(x, indices, probs, *own, ActivationType.SWIGLU, layout=LAYOUTS[3])
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        second = torch.autograd.grad(out, leaves, dout)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, dout)
        return first, second

    (first, second), targets = on(Bf16Engine(), step)
    # As autograd takes them: no accumulators.
    assert targets == [GradientMode.FRESH] * 2
    assert shared == free == [False, True]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_backward_that_failed_behind_dgated_is_not_repeated(on, monkeypatch):
    """dz lies where z was. Running out of memory before that loses nothing."""
    failing, gemm, memory = [], HopperGemms.grouped_gemm, bf16_sm90.empty

    def work_or_fail(work):
        def replaced(*arguments):
            if failing and failing[0] is work:
                raise torch.OutOfMemoryError(failing.pop())
            return work(*arguments)

        return replaced

    monkeypatch.setattr(bf16_sm90, "empty", work_or_fail(memory))
    monkeypatch.setattr(HopperGemms, "grouped_gemm", work_or_fail(gemm))

    def step():
        x, indices, probs, dout = batch()
        w1, w2, *_ = parameters(LAYOUTS[0])
        out = expert_mlp(x, indices, probs, w1, w2, None, None, ActivationType.SWIGLU)
        for work in (memory, gemm):
            failing.append(work)
            with pytest.raises(RuntimeError, match="function"):
                out.backward(dout)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(dout)
        assert all(t.grad is None for t in (x, probs, w1, w2))

    on(Bf16Engine(), step)


def node_of(arrangement):
    """`(node, its weights)`."""
    if arrangement != "per_expert":
        layout = WeightLayout() if arrangement == "native" else LAYOUTS[3]
        weights = parameters(layout)[:2]
        make = getattr(SonicMoEMlpNode, f"from_{arrangement}")
        return make(*weights, ActivationType.SWIGLU, config=SonicMoEConfig()), weights
    arrays = (weight.detach().float().numpy() for weight in parameters(LAYOUTS[3])[:2])
    experts = expert_modules(*arrays, torch.bfloat16)
    weights = [e.up_gate_proj.weight for e in experts] + [e.down_proj.weight for e in experts]
    node = SonicMoEMlpNode(experts, E, H, I, ActivationType.SWIGLU, config=SonicMoEConfig())
    return node, weights


@pytest.mark.parametrize("arrangement", ["native", "fused", "per_expert"])
def test_a_node_has_nothing_to_make_of_weights_that_were_written(
    on, arrangement, monkeypatch, weights_on_a_gpu
):
    """It reads them where they lie, and sees what was written; a backward in between does not."""
    looked, engines, refresh = [], [], Bf16Engine.refresh

    def noted(self, *arguments):
        looked.append(self)
        return refresh(self, *arguments)

    monkeypatch.setattr(Bf16Engine, "refresh", noted)

    def step():
        node, weights = node_of(arrangement)
        x, indices, probs, dout = batch()
        early = node(x, None, indices, probs)
        with torch.no_grad():
            for weight in weights:
                weight.mul_(-0.5)
        late = node(x, None, indices, probs)
        if engines[-1] is Bf16Engine:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                early.backward(dout)
        late.backward(dout)
        node.step()
        return [x.grad, probs.grad, late.detach(), node(x, None, indices, probs).detach()]

    results = []
    for engine in (Bf16Engine, ReferenceEngine):
        engines.append(engine)
        results.append(on(engine(), step)[0])
    assert len(looked) == 1
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() < 1e-2 * other.norm()
