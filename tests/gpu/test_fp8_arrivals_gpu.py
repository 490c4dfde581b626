"""Tokens and gradients of the output that arrive in FP8, on the Hopper engine: the bits of those that
it quantises itself, and weight gradients of the reference engine on the same codes.
"""

from __future__ import annotations

import pytest
import torch
from gpu.engine_cases import E, H, K, make_case
from node.direct_layers import assert_same_bits

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import make_dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize
from sonicmoe.quant.tokens import quantize_tokens, tokens_of

pytestmark = pytest.mark.gpu
T = 700
SIDES = {"x": ("x",), "dout": ("dout",), "x and dout": ("x", "dout")}
MODES = {
    "default": {},
    "stagewise": {"stagewise_memory": True},
    "recompute_z": {"recompute_z": True},
    "plain wgrad": {"fp8_wgrad": False},
}


class Source:
    """Has the gradient; what autograd delivers is NaN."""

    def __init__(self, gradient):
        self.gradient = gradient

    def take(self, gradient):
        return self.gradient


class Problem:
    """A layer and a batch; a third of the slots is not here, and some tokens have none."""

    def __init__(self, seed=0):
        self.case = make_case(T, invalid=0.4, empty=(), seed=seed)
        self.x, self.dout, self.probs = self.case.x, self.case.dout, self.case.probs
        self.indices = torch.where(self.case.valid, self.case.indices, -1)

    def sent(self, name):
        """x or dout as a sender quantises it; tokens without a valid slot are NaN."""
        q = quantize(getattr(self, name).float(), rows(128))
        codes, scale = q.codes.clone(), q.scale_inv.clone()
        unused = ~self.case.valid.any(1)
        assert bool(unused.any())
        codes.view(torch.uint8)[unused] = 0x7F
        scale[unused] = float("nan")
        return tokens_of(codes, scale)

    def node(self, engine="hopper", options=None, **ways):
        """A node, and its parameters with `main_grad`s of zeros."""
        config = SonicMoEConfig(engine=engine, fp8_mode="perf", **(options or {}))
        weights = [torch.nn.Parameter(weight.clone()) for weight in self.case.weights[:2]]
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        return SonicMoEMlpNode.from_native(*weights, config=config, **ways), weights

    def step(self, engine="hopper", x=None, dout=None, **options):
        """out, dx, dprobs and both weight gradients. x: tokens that arrived in FP8. dout: the
        gradient of a source, which autograd then delivers as NaN.
        """
        node, weights = self.node(engine, options)
        probs, dx_to = self.probs.clone().requires_grad_(), self.x.clone().requires_grad_()
        given = {} if x is None else {"x_scale": x.scale_inv, "dx_to": dx_to}
        if dout is not None:
            given["dout_source"] = Source(dout)
        out = node(dx_to if x is None else x.codes, None, self.indices, probs, **given)
        nan = torch.full((1, 1), float("nan"), dtype=torch.bfloat16, device="cuda")
        out.backward(self.dout if dout is None else nan.expand(T, H))
        node.step()
        return [out.detach(), dx_to.grad, probs.grad, *(weight.main_grad for weight in weights)]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mode", MODES)
def test_bits_and_weight_gradients(side, mode):
    problem, options = Problem(), MODES[mode]
    sent = {name: problem.sent(name) for name in SIDES[side]}
    got, itself = problem.step(**sent, **options), problem.step(**options)
    # Weight gradients are rounded once more where codes arrived in place of values.
    assert_same_bits(got[:3], itself[:3])
    reference = problem.step("reference", **sent, **options)
    for name, ours, wanted in zip(("dw1", "dw2"), got[3:], reference[3:], strict=True):
        error = (ours - wanted).norm() / wanted.norm()
        assert bool(torch.isfinite(ours).all()) and float(error) < 0.025, (name, float(error))


@pytest.mark.parametrize("side", SIDES)
def test_repeats_bit_for_bit(side):
    problem = Problem(1)
    sent = {name: problem.sent(name) for name in SIDES[side]}
    assert_same_bits(problem.step(**sent), problem.step(**sent))


def test_a_receiver_of_the_gradient_may_be_expanded():
    """Nobody reads the values of `dx_to`."""
    problem, seen = Problem(), []
    tokens, (node, _) = problem.sent("x"), problem.node()
    dx_to = torch.zeros(1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dx_to = dx_to.expand(T, H)
    dx_to.register_hook(seen.append)
    given = {"x_scale": tokens.scale_inv, "dx_to": dx_to}
    node(tokens.codes, None, problem.indices, problem.probs, **given).backward(problem.dout)
    assert torch.equal(seen[0], problem.step(x=tokens)[1])


def test_a_dispatcher_that_quantises_both_ways():
    """The bits of codes that were made beside the node."""
    problem, results = Problem(3), []
    tokens, dout = quantize_tokens(problem.x), quantize_tokens(problem.dout)
    for ways in ({}, {"flush": "step"}):
        node, weights = problem.node(**ways)
        x = problem.x.clone().requires_grad_()
        dispatcher = make_dispatcher(E, fp8=True, fp8_grad=True)
        received = dispatcher.dispatch(x, problem.indices, problem.probs)
        assert torch.equal(received.x.view(torch.uint8), tokens.bytes)
        out = node(
            received.x, received.tokens_per_expert, received.indices, received.probs,
            x_scale=received.x_scale, dx_to=received.dx_to, dout_source=received.dout_source,
        )  # fmt: skip
        dispatcher.combine(out, received.handle).backward(problem.dout)
        node.step()
        results.append([x.grad, *(weight.main_grad for weight in weights)])
    assert received.indices.shape == (T, K)
    home = problem.step(x=problem.sent("x"), dout=dout)
    for wanted in results:
        assert_same_bits(wanted, (home[1], *home[3:]))
