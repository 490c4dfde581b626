"""The FP8 recipe applied by hand: one expert after the other, every operand quantised and
dequantised where the recipe says so.

An independent second implementation of what the reference engine emulates. It shares the quantiser
with the package (which has tests of its own) and nothing else. `skip` leaves a named quantisation
out, which shows that a test would notice.
"""

from __future__ import annotations

import numpy as np
from engine.moe_golden import OUTPUTS, Result, make_problem, native_order, native_weights
from framework import numpy, tensor, torch
from oracle.golden import base_of, slope, value

from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.quant.format import Code
from sonicmoe.quant.reference import dequantize, quantize

# Every quantisation point of the recipe, and what changes when it is left out.
EVERYTHING = {"out", "dx", "dprobs", "dw1", "dw2"}
AFFECTS = {
    "x": EVERYTHING,
    "w1": EVERYTHING,
    "y1": {"out"},
    "w2": {"out"},
    "z": {"dx", "dprobs", "dw1", "dw2"},
    "dout": {"dx", "dprobs", "dw1"},
    "w2_dgrad": {"dx", "dprobs", "dw1"},
    "dz": {"dx"},
    "w1_dgrad": {"dx"},
    "wgrad_x": {"dw1"},
    "wgrad_dz": {"dw1"},
    "wgrad_dout": {"dw2"},
    "wgrad_y1s": {"dw2"},
}


class Hand:
    """How operands of one computation are rounded."""

    def __init__(self, settings, dtype, skip=(), exact=False):
        self.settings, self.recipe, self.dtype = settings, settings.recipe, dtype
        self.skip, self.exact = set(skip), exact

    def fp32(self, array):
        """As fp32; when everything is meant to be exact, it must lose nothing."""
        narrow = np.asarray(array, np.float32)
        assert not self.exact or np.array_equal(narrow.astype(np.float64), array), (
            "the data were meant to be exact in fp32"
        )
        return tensor(narrow, torch.float32)

    def rounded(self, array):
        """To the dtype of the tokens and back."""
        return numpy(tensor(np.asarray(array, np.float32), torch.float32).to(self.dtype))

    def quantised(self, array, name, code=Code.E4M3):
        block, scale_format = getattr(self.recipe, name), self.recipe.scale_format
        return quantize(self.fp32(array), block, code, scale_format)

    def operand(self, array, name):
        """A GEMM operand after the quantisation `name`."""
        plain_wgrad = name.startswith("wgrad") and not self.settings.fp8_wgrad
        if self.recipe is None or plain_wgrad:
            return self.rounded(array)
        return array if name in self.skip else numpy(dequantize(self.quantised(array, name)))

    def stored_z(self, z):
        """z as backward reads it."""
        if "z" in self.skip:
            return z
        if self.recipe is None:
            return self.rounded(z)
        if self.settings.save_z is ZCode.BF16:
            return numpy(self.fp32(z).to(torch.bfloat16))
        code = Code(self.settings.save_z.value)
        return numpy(dequantize(self.quantised(z, "z", code)))


def activation_of(problem, z):
    """`(y1, gate value, gate slope, up)` of interleaved (or ungated) `z`."""
    act = base_of(problem.activation.value)
    gate, up = (z[:, 0::2], z[:, 1::2]) if problem.gated else (z, np.ones_like(z))
    a = value(act, gate)
    return a * up, a, slope(act, gate), up


def by_hand(problem, settings, dtype, skip=(), exact=False) -> Result:
    """Everything that a forward and a backward give."""
    hand = Hand(settings, dtype, skip, exact)
    like = problem.x, problem.x, problem.probs, problem.up_gate, problem.down
    result = Result(*map(np.zeros_like, like))
    for expert in range(problem.num_experts):
        t, k = np.nonzero(problem.indices == expert)
        if len(t):
            add_expert(result, problem, hand, expert, t, k)
    result.out, result.dx = hand.rounded(result.out), hand.rounded(result.dx)
    return result


def add_expert(result, problem, hand, expert, t, k):
    """What the slots `t, k` of one expert add to outputs and gradients of tokens, and its weight gradients."""
    alignment = hand.settings.row_alignment

    def rows(values):
        """Padding rows of zeros follow."""
        return np.pad(values, ((0, -len(values) % alignment), (0, 0)))

    def gathered(name):
        """x or dout, as its product reads it. Blocks of several rows are cut after the gather."""
        tokens = getattr(problem, name)
        if hand.recipe is not None and getattr(hand.recipe, name).rows > 1:
            return hand.operand(rows(tokens[t]), name)
        return rows(hand.operand(tokens, name)[t])

    def wgrad(name, other, its_name):
        """The weight gradient of x or dout and of rows."""
        tokens = hand.operand(rows(getattr(problem, name)[t]), f"wgrad_{name}")
        return tokens.T @ hand.operand(other, its_name)

    w1, w2 = (weight[expert] for weight in native_weights(problem)[:2])
    p, true = rows(problem.probs[t, k][:, None]), slice(len(t))
    z = gathered("x") @ hand.operand(w1, "w1").T
    y1 = hand.operand(activation_of(problem, z)[0], "y1")
    y2 = hand.rounded(y1 @ hand.operand(w2, "w2").T)

    y1, a, da, up = activation_of(problem, hand.stored_z(z))
    dy1 = gathered("dout") @ hand.operand(w2, "w2_dgrad")
    dgate, dup = p * dy1 * up * da, p * dy1 * a
    dz = np.stack([dgate, dup], -1).reshape(len(p), -1) if problem.gated else dgate
    y1s = p * y1
    if hand.recipe is not None and hand.recipe.rounds_rows:
        dz, y1s = hand.rounded(dz), hand.rounded(y1s)
    dx_rows = hand.rounded(hand.operand(dz, "dz") @ hand.operand(w1, "w1_dgrad"))
    np.add.at(result.out, t, (p * y2)[true])
    np.add.at(result.dx, t, dx_rows[true])
    result.dprobs[t, k] = (dy1 * y1)[true].sum(-1)
    order = native_order(problem.up_gate.shape[2], problem.gated)
    result.dw1[expert][:, order] = wgrad("x", dz, "wgrad_dz")
    result.dw2[expert] = wgrad("dout", y1s, "wgrad_y1s").T


def coarse_problem(**changes):
    """Small odd integers (5 significant bits: E4M3 must round them), sparse weights, power-of-two
    probabilities, ReGLU.

    With power-of-two scales every sum and product is exact in fp32, so two right implementations
    agree to the last bit.
    """
    sizes = {"tokens": 150, "hidden": 144, "intermediate": 136, "experts": 3, "topk": 2}
    problem = make_problem(ActivationType.REGLU, **{**sizes, "empty": (1,), **changes})
    rng = np.random.default_rng(11)

    def integers(shape, density=1.0):
        signed = rng.choice([-1, 1], shape) * rng.integers(1, 32, shape)
        return (signed * (rng.random(shape) < density)).astype(np.float64)

    return problem.but(
        x=integers(problem.x.shape),
        dout=integers(problem.dout.shape),
        probs=2.0 ** -rng.integers(0, 3, problem.probs.shape),
        up_gate=integers(problem.up_gate.shape, 0.1),
        down=integers(problem.down.shape, 0.1),
    )


def distance(one, other, name):
    """Largest difference over the largest value."""
    one, other = getattr(one, name), getattr(other, name)
    return np.abs(one - other).max() / np.abs(other).max()


def assert_equal_to_rounding(actual, expected):
    """To that of sums in fp32."""
    for name in OUTPUTS:
        assert distance(actual, expected, name) < 1e-6, name
