"""Gradients of the output that arrive in FP8 on the Hopper engine: the bits of gradients that it
quantises itself, and weight gradients of the reference engine on the same codes.
"""

from __future__ import annotations

import logging

import pytest
import torch
from gpu.test_hopper_fp8_tokens_gpu import MODES, E, H, K, Problem, T

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import make_dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize
from sonicmoe.quant.tokens import quantize_tokens, to_bfloat16, tokens_of

pytestmark = pytest.mark.gpu
NAMES = ("out", "dx", "dprobs", "dw1", "dw2")
SIDES = pytest.mark.parametrize("x_too", [False, True], ids=["dout", "x and dout"])


class Source:
    """Has the gradient; what autograd delivers is NaN."""

    def __init__(self, gradient):
        self.gradient = gradient

    def take(self, gradient):
        return self.gradient


class Gradients(Problem):
    """The same with dout as a sender quantises it; rows without a valid slot are NaN."""

    def __init__(self, seed=0):
        super().__init__(seed)
        q = quantize(self.dout.float(), rows(128))
        codes, scale = q.codes.clone(), q.scale_inv.clone()
        unused = (self.indices < 0).all(1)
        codes.view(torch.uint8)[unused] = 0x7F
        scale[unused] = float("nan")
        self.sent = tokens_of(codes, scale)

    def step(self, engine, dout, *, x_too=False, **options):
        """out, dx, dprobs and both weight gradients, of a source that gives `dout`."""
        config = SonicMoEConfig(engine=engine, fp8_mode="perf", **options)
        weights = [torch.nn.Parameter(weight.clone()) for weight in self.weights]
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        node = SonicMoEMlpNode.from_fused(*weights, config=config)
        probs, dx_to = self.probs.clone().requires_grad_(), self.x.clone().requires_grad_()
        given = {"x_scale": self.scale, "dx_to": dx_to} if x_too else {}
        x = self.codes if x_too else dx_to
        out = node(x, None, self.indices, probs, dout_source=Source(dout), **given)
        nan = torch.full((1, 1), float("nan"), dtype=torch.bfloat16, device="cuda")
        out.backward(nan.expand(T, H))
        node.step()
        return [out.detach(), dx_to.grad, probs.grad, *(weight.main_grad for weight in weights)]


@pytest.mark.parametrize("mode", MODES)
@SIDES
def test_bits_and_weight_gradients(mode, x_too):
    problem, options = Gradients(), MODES[mode]
    got = problem.step("hopper", problem.sent, x_too=x_too, **options)
    itself = problem.step("hopper", problem.dout, x_too=x_too, **options)
    for name, ours, wanted in zip(NAMES[:4], got, itself, strict=False):
        assert torch.equal(ours, wanted), name
    reference = problem.step("reference", problem.sent, x_too=x_too, **options)
    for name, ours, wanted in zip(("dw1", "dw2"), got[3:], reference[3:], strict=True):
        error = (ours - wanted).norm() / wanted.norm()
        assert bool(torch.isfinite(ours).all()) and float(error) < 0.025, (name, float(error))


@SIDES
def test_repeats_bit_for_bit(x_too):
    problem = Gradients(1)
    first, again = (problem.step("hopper", problem.sent, x_too=x_too) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_the_hopper_engine_gets_the_values_of_rows_with_one_scale(caplog):
    problem = Gradients(2)
    sent = quantize_tokens(problem.dout, row_scale=True)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        got = problem.step("hopper", sent)
    (warning,) = [r.getMessage() for r in caplog.records if "dequantised" in r.getMessage()]
    assert warning.startswith("engine hopper on cuda:0: gradients that arrive in FP8")
    wanted = problem.step("hopper", to_bfloat16(sent))
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_a_dispatcher_that_quantises_both_ways():
    """The bits of codes that were made beside the node, on the side stream's kernels too."""
    problem, results = Gradients(3), []
    tokens, dout = quantize_tokens(problem.x), quantize_tokens(problem.dout)
    for split in (False, True):
        weights = [torch.nn.Parameter(weight.clone()) for weight in problem.weights]
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        config = SonicMoEConfig(engine="hopper", fp8_mode="perf")
        node = SonicMoEMlpNode.from_fused(*weights, config=config, split_wgrad=split)
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
    home = problem.step("hopper", dout, x_too=True)
    for wanted in results:
        assert all(torch.equal(*pair) for pair in zip(wanted, (home[1], *home[3:]), strict=True))
