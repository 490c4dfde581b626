"""`split_wgrad` behind a dispatcher: weight gradients are launched behind the combine of dx, and
their memory outlives everybody.

No GPU here: streams and events are recorders, tensors of the host count as a GPU's.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.node import late_wgrad

T, K, E, H, I = 12, 2, 4, 16, 8


class Log(list):
    """What happened, in order."""

    def spy(self, monkeypatch, owner, name):
        original = getattr(owner, name)
        watched = lambda *arguments: (self.append(name), original(*arguments))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def log(monkeypatch):
    """Streams that log; every tensor is a GPU's."""
    said = Log()

    class Stream:
        device = "cuda:0"

        def __init__(self, name="side", device=None):
            self.name = name

        def record_event(self):
            return "dx is there"

        def wait_event(self, event):
            said.append(f"{self.name} waits until {event}")

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(which):
        said.append(f"on {which.name}")
        yield

    current = lambda device=None: Stream("caller")  # noqa: E731
    fake = SimpleNamespace(Stream=Stream, stream=stream, current_stream=current)
    monkeypatch.setattr(late_wgrad, "torch", SimpleNamespace(cuda=fake, Tensor=torch.Tensor))
    monkeypatch.setattr(late_wgrad, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(late_wgrad.WgradQueue, "_keep", lambda self, tensors, stream: None)
    for name in ("backward_dx", "backward_dw"):
        said.spy(monkeypatch, ReferenceEngine, name)
    return said


class Dispatch(torch.autograd.Function):
    """Stands for a dispatch, whose backward is the combine of dx."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        ctx.log.append("combine of dx")
        return dx, None


def make_node(**options):
    generator = torch.Generator().manual_seed(0)

    def weight(*shape):
        made = torch.nn.Parameter(torch.randn(*shape, generator=generator))
        made.main_grad = torch.zeros(shape)
        return made

    weights = weight(E, H, 2 * I), weight(E, I, H)
    config = SonicMoEConfig(engine="reference")
    return SonicMoEMlpNode.from_fused(*weights, config=config, **options), weights


def forward(node, x):
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return node(x, None, ids, torch.rand(T, K, generator=generator))


def tokens(seed=2):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).requires_grad_()


LAUNCH = ["side waits until dx is there", "on side", "backward_dw"]


def backward(node, log):
    """Of one layer behind a dispatch."""
    forward(node, Dispatch.apply(tokens(), log)).sum().backward()


def test_the_combine_of_dx_is_launched_first(log):
    node, _ = make_node(split_wgrad=True)
    backward(node, log)
    assert log == ["backward_dx", "combine of dx", *LAUNCH]
    node.finish_wgrad()
    assert log[-1] == "caller waits for side" and log.count("backward_dw") == 1


def test_tokens_without_a_gradient_have_no_combine_to_wait_for(log):
    node, _ = make_node(split_wgrad=True)
    forward(node, tokens().detach()).sum().backward()
    assert log == ["backward_dx", *LAUNCH]


def test_several_layers_and_micro_batches(log):
    """Launches stay in the order of the backwards; a combine that never comes is made up for by the
    next backward or by step().
    """
    (first, weights), (second, _) = make_node(split_wgrad=True), make_node(split_wgrad=True)
    for _ in range(2):
        x = Dispatch.apply(tokens(), log)
        forward(second, Dispatch.apply(forward(first, x), log)).sum().backward()
    one_layer = ["backward_dx", "combine of dx", *LAUNCH]
    assert log == one_layer * 4
    del log[:]
    for _ in range(2):
        x = Dispatch.apply(tokens(), log)
        forward(first, x).sum().backward(inputs=weights)  # ends before the dispatch
    assert log == ["backward_dx", "backward_dx", *LAUNCH]
    first.step()
    assert log[5:] == [*LAUNCH, "caller waits for side"]


def test_bits_are_those_of_a_whole_backward(log):
    results = []
    for split in (False, True):
        node, weights = make_node(split_wgrad=split)
        x = tokens()
        for _ in range(3):
            forward(node, Dispatch.apply(x, log)).sum().backward()
        node.step()
        results.append([x.grad, *(weight.main_grad for weight in weights)])
    assert all(bool(a.any()) and torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_backward_launches_once_each(log):
    node, _ = make_node(split_wgrad=True)
    out = forward(node, Dispatch.apply(tokens(), log)).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert log.count("backward_dw") == 2 and log.count("combine of dx") == 2


def test_operands_and_accumulators_are_kept_for_the_side_stream(monkeypatch, log):
    kept = []
    keep = lambda self, tensors, stream: kept.extend(tensors)  # noqa: E731
    monkeypatch.setattr(late_wgrad.WgradQueue, "_keep", keep)
    node, _ = make_node(split_wgrad=True)
    backward(node, log)
    held = node._state.gradients.held().values()
    addresses = {tensor.data_ptr() for tensor in kept}
    assert {tensor.data_ptr() for tensor in held} <= addresses
    assert len(addresses) >= len(held) + 4  # x, dout, dz, y1s at least
    assert len({id(tensor) for tensor in kept}) == len(kept)


def test_without_an_allocator_that_helps_they_are_held_until_finish(monkeypatch):
    class Tensor:
        """Of a framework without record_stream."""

    queue, tensor = late_wgrad.WgradQueue(), Tensor()
    alive = weakref.ref(tensor)
    queue._keep([tensor], "side")
    del tensor
    assert alive() is not None
    queue._on_stream, queue._stream = True, SimpleNamespace(device=None)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fake = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(late_wgrad, "torch", SimpleNamespace(cuda=fake))
    queue.finish()
    assert alive() is None
