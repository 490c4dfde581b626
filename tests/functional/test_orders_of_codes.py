"""Codes of weights on engine `hopper`, whose passes reach kernels on the host: in forward's order alone
as long as every backward comes with a forward that runs again, else in backward's too.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engine.hopper_host import OURS, host_passes, native_fixture  # noqa: F401
from torch.utils.checkpoint import checkpoint

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.select import EngineChoice
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional import plan
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.node import choices
from sonicmoe.weights.stacked_cache import _kept, _owner

E, K, T, H, I = 4, 2, 70, 144, 64
FP8 = SonicMoEConfig(fp8_mode="perf")


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    for module in (plan, choices):
        monkeypatch.setattr(module, "ready_engine", lambda *_: EngineChoice(OURS, "a test"))


class Functional:
    """Two calls on one set of weights."""

    def __init__(self):
        made = torch.Generator().manual_seed(0)
        shapes = (E, 2 * I, H), (E, H, I)
        self.weights = [
            torch.nn.Parameter((torch.randn(s, generator=made) * 0.1).bfloat16()) for s in shapes
        ]
        self.ids = torch.rand(T, E, generator=made).topk(K, 1).indices
        self.probs = torch.rand(T, K, generator=made)
        self.x = torch.randn(T, H, generator=made).bfloat16().requires_grad_()

    def experts(self, x):
        given = x, self.ids, self.probs, *self.weights, None, None, ActivationType.SWIGLU
        return expert_mlp(*given, use_fp8=True)

    def __call__(self, x):
        return self.experts(self.experts(x))

    def step(self, run=None):
        """Gradients of x and the weights, under a wrapper of the forward, and then a write."""
        (run or self)(self.x).float().square().sum().backward()
        found = [leaf.grad for leaf in (self.x, *self.weights)]
        self.x.grad = None
        with torch.no_grad():
            for weight in self.weights:
                weight.mul_(0.9)
                weight.grad = None
        return found

    def kept(self):
        (kept,) = _kept[_owner(self.weights[0])].values()
        return kept.prepared.weights


class Node(Functional):
    def __init__(self):
        super().__init__()
        self.node = SonicMoEMlpNode.from_native(*self.weights, config=FP8)

    def experts(self, x):
        return self.node(x, None, self.ids, self.probs)

    def kept(self):
        return self.node._state.weights._prepared.weights


def compiled(layer, x):
    torch._dynamo.reset()
    graph = torch.compile(layer, backend="aot_eager")
    return checkpoint(graph, x, use_reentrant=False)


WAYS = {
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "compiled": compiled,
}


@pytest.mark.parametrize("kind", [Functional, Node])
@pytest.mark.parametrize("way", WAYS)
def test_the_other_order_is_made_by_each_backward(kind, way):
    """To the bits of a layer that keeps both. A forward without gradients changes nothing; one with
    a backward of its own adds that order, in the same weights, for good.
    """
    layer, wanted = kind(), kind()
    run = partial(WAYS[way], layer)
    with torch.no_grad():
        layer(layer.x)
    first = layer.kept()
    for _ in range(2):
        assert all(map(torch.equal, layer.step(run), wanted.step()))
        # On a host new codes are new objects.
        assert layer.kept().store is first.store and not layer.kept().two_orders
    assert layer.kept().store.nbytes * 2 == wanted.kept().store.nbytes and wanted.kept().two_orders
    for again in (None, run, run):
        assert all(map(torch.equal, layer.step(again), wanted.step()))
        assert layer.kept().store is first.store and layer.kept().two_orders
