"""Rows that a dispatcher has sorted, and the parameters, memory and schedule of Megatron-Core's layers.
tests/oracle has the numbers.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from framework import IS_PADDLE, torch

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.errors import OutOfMemoryError
from sonicmoe.layer.late_wgrad import WgradStore
from sonicmoe.layer.state import LayerState
from sonicmoe.node.mlp_node import SonicMoEMlpNode
from sonicmoe.weights.parameters import NumberedParameters

pytestmark = pytest.mark.skipif(IS_PADDLE, reason="Megatron-Core runs on PyTorch")

E, H, I, T = 3, 8, 16, 13
COUNTS = [4, 0, 7]  # two rows belong to nobody
SWIGLU = ActivationType.SWIGLU


class Case:
    """A layer, one batch, and what a node makes of it whose gradients go through autograd."""

    def __init__(self, biased=False):
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Module(), torch.nn.Module()
        for expert in range(E):
            for module, shape in ((self.up, (2 * I, H)), (self.down, (H, I))):
                weight = torch.nn.Parameter(torch.randn(shape) * 0.3)
                module.register_parameter(f"weight{expert}", weight)
        self.weights = [*self.up.parameters(), *self.down.parameters()]
        self.x, self.counts = torch.randn(T, H), torch.tensor(COUNTS)
        self.probs, self.dout = torch.rand(T), torch.randn(T, H)
        shapes = ((E, 2 * I), (E, H)) if biased else ()
        self.biases = tuple(torch.randn(shape) for shape in shapes)
        self.inputs = [self.x, self.probs, *self.biases]
        for tensor in self.inputs:
            tensor.requires_grad_()

    def node(self, store=None, **options):
        modules, sizes = (self.up, self.down), (E, H, I)
        state = LayerState(NumberedParameters(*modules, sizes, SWIGLU, **options))
        state.offers = None if store is None else lambda: store
        return SonicMoEMlpNode.over(state, SWIGLU)

    def run(self, node):
        return node.forward_sorted(self.x, self.counts, self.probs, biases=self.biases or None)

    def wanted(self):
        """Gradients of the inputs, then of the weights, as tests/oracle compares them with fp64."""
        out = self.run(self.node(through_autograd=True))
        return torch.autograd.grad(out, [*self.inputs, *self.weights], self.dout)


def close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_caller_may_multiply_the_output_by_probabilities_himself():
    case = Case(biased=True)
    with torch.no_grad():
        case.probs.fill_(1.0)
        wanted = case.run(case.node())
        case.probs = None
        assert torch.equal(case.run(case.node()), wanted)


def test_gradients_go_through_autograd_by_name():
    case = Case()
    for weight in case.weights:
        weight.main_grad = torch.full_like(weight, 7.0)
    case.run(case.node(through_autograd=True)).backward(case.dout)
    close([weight.grad for weight in case.weights], case.wanted()[2:])
    assert all((weight.main_grad == 7.0).all() for weight in case.weights)


def test_a_schedule_runs_the_gradients_of_whole_backwards_in_order():
    """Those of biases are complete when their backward returns."""
    case, store, fired = Case(biased=True), WgradStore(), []
    for weight in case.weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        weight.register_post_accumulate_grad_hook(fired.append)
    node = case.node(store)
    inputs = len(case.inputs)
    for times in (1, 2):
        case.run(node).backward(case.dout)
        wanted = [times * gradient for gradient in case.wanted()[:inputs]]
        close([tensor.grad for tensor in case.inputs], wanted)
    assert not fired
    assert all((weight.main_grad == 0).all() for weight in case.weights)
    wanted = case.wanted()[inputs:]
    for times in (1, 2, 2):  # the third finds nothing
        store.run()
        close([weight.main_grad for weight in case.weights], [times * dw for dw in wanted])
    assert all(weight.grad_added_to_main_grad for weight in case.weights)
    assert all((weight.grad == 0).all() for weight in case.weights)


def test_a_schedule_may_run_again_what_found_no_memory(monkeypatch):
    def full(*_):
        raise MemoryError

    case, store = Case(), WgradStore()
    for weight in case.weights:
        weight.main_grad = torch.zeros_like(weight)
    case.run(case.node(store)).backward(case.dout)
    words = "(?s)out of memory in the weight gradients.*put off may be repeated"
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceEngine, "backward_dw", full)
        with pytest.raises(OutOfMemoryError, match=words):
            store.run()
    assert not any(weight.main_grad.any() for weight in case.weights)
    store.run()
    close([weight.main_grad for weight in case.weights], case.wanted()[len(case.inputs) :])


@pytest.mark.parametrize("put_off", [False, True])
def test_memory_is_asked_for_at_each_backward(put_off):
    """Megatron-FSDP's words: a getter, and writing in place of adding."""
    case, store = Case(), WgradStore() if put_off else None
    asked = []
    for weight in case.weights:

        def get(weight=weight):
            asked.append(weight)
            return torch.full_like(weight, float("nan"))

        weight.get_main_grad, weight.overwrite_main_grad = get, True
    node = case.node(store)
    for times in (1, 2):
        case.run(node).backward(case.dout)
        if store is not None:
            store.run()
        assert len(asked) == times * len(case.weights)
        close([weight.main_grad for weight in case.weights], case.wanted()[2:])


def test_sums_that_megatron_fsdp_keeps_whole_are_added_to():
    """It asks to overwrite there too, as of an expert-data-parallel group of one rank."""
    case = Case()
    for weight in case.weights:
        weight.main_grad, weight.overwrite_main_grad = torch.zeros_like(weight), True
        weight.get_main_grad = lambda weight=weight: weight.main_grad
        weight._gbuf = SimpleNamespace(is_data_distributed=False)
    node = case.node()
    for times in (1, 2):
        case.run(node).backward(case.dout)
        wanted = [times * dw for dw in case.wanted()[2:]]
        close([weight.main_grad for weight in case.weights], wanted)


def test_stand_ins_share_memory_and_stay_zero():
    case = Case()
    for weight in case.weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    node = case.node()
    case.run(node).backward(case.dout)
    up = case.weights[:E]
    assert len({weight.grad.data_ptr() for weight in up}) == 1
    up[0].grad.fill_(5.0)  # somebody writes where others look
    for weight in case.weights:
        weight.grad = None
    case.run(node).backward(case.dout)
    assert all((weight.grad == 0).all() for weight in case.weights)
