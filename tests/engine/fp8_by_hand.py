"""The FP8 recipe applied by hand: one expert after the other, every operand quantised and
dequantised where the recipe says so.

An independent second implementation of what the reference engine emulates. It shares the quantiser
with the package (which has tests of its own) and nothing else. `skip` leaves a named quantisation
out, which shows that a test would notice.
"""

from __future__ import annotations

import numpy as np
from engine.moe_golden import (
    OUTPUTS,
    Result,
    make_problem,
    native_order,
    native_weights,
)
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


class Rows:
    """The slots of one expert, in the order of its rows; padding rows follow."""

    def __init__(self, indices, expert, alignment):
        self.slots = [at for at in np.ndindex(*indices.shape) if indices[at] == expert]
        self.tokens = [token for token, _ in self.slots]
        self.padded = -(-len(self.slots) // alignment) * alignment

    def filled(self, values, padding=0.0):
        """`[rows, C]` values of the true rows, and what padding rows hold."""
        made = np.full((self.padded, values.shape[1]), padding)
        made[: len(values)] = values
        return made

    def of(self, tokens, padding=0.0):
        return self.filled(tokens[self.tokens], padding)


class Tokens:
    """x or dout, as the product that gathers it reads it, and as wgrad does."""

    def __init__(self, hand, name, values):
        self.hand, self.name, self.values = hand, name, values
        self.operand = hand.operand(values, name)

    def read(self, rows):
        recipe = self.hand.recipe
        if recipe is not None and getattr(recipe, self.name).rows > 1:
            # Blocks of several rows are cut after the gather.
            return self.hand.operand(rows.of(self.values), self.name)
        return rows.of(self.operand)

    def times(self, rows, other, name):
        """The weight gradient `tokens^T other`, where the other operand is the recipe's `name`."""
        mine = self.hand.operand(rows.of(self.values), f"wgrad_{self.name}")
        return mine.T @ self.hand.operand(other, name)


def activation_of(problem, z):
    """`(y1, gate value, gate slope, up)` of interleaved (or ungated) `z`."""
    act = base_of(problem.activation.value)
    gate, up = (z[:, 0::2], z[:, 1::2]) if problem.gated else (z, np.ones_like(z))
    a = value(act, gate)
    return a * up, a, slope(act, gate), up


def by_hand(problem, settings, dtype, skip=(), exact=False) -> Result:
    """Everything that a forward and a backward give."""
    hand = Hand(settings, dtype, skip, exact)
    x = Tokens(hand, "x", problem.x)
    dout = Tokens(hand, "dout", problem.dout)
    like = problem.x, problem.x, problem.probs, problem.up_gate, problem.down
    result = Result(*map(np.zeros_like, like))
    for expert in range(problem.num_experts):
        rows = Rows(problem.indices, expert, settings.row_alignment)
        if rows.slots:
            add_expert(result, problem, hand, x, dout, rows, expert)
    result.out, result.dx = hand.rounded(result.out), hand.rounded(result.dx)
    return result


def add_expert(result, problem, hand, x, dout, rows, expert):
    """What one expert adds to outputs and gradients of tokens, and its weight gradients."""
    w1, w2 = (weight[expert] for weight in native_weights(problem)[:2])
    p = rows.filled(np.array([[problem.probs[slot]] for slot in rows.slots]))
    z = x.read(rows) @ hand.operand(w1, "w1").T
    y1 = hand.operand(activation_of(problem, z)[0], "y1")
    y2 = hand.rounded(y1 @ hand.operand(w2, "w2").T)

    y1, a, da, up = activation_of(problem, hand.stored_z(z))
    dy1 = dout.read(rows) @ hand.operand(w2, "w2_dgrad")
    dgate, dup = p * dy1 * up * da, p * dy1 * a
    dz = np.stack([dgate, dup], -1).reshape(rows.padded, -1) if problem.gated else dgate
    y1s = p * y1
    if hand.recipe is not None and hand.recipe.rounds_rows:
        dz, y1s = hand.rounded(dz), hand.rounded(y1s)
    dx_rows = hand.rounded(hand.operand(dz, "dz") @ hand.operand(w1, "w1_dgrad"))
    for row, (t, k) in enumerate(rows.slots):
        result.out[t] += p[row, 0] * y2[row]
        result.dx[t] += dx_rows[row]
        result.dprobs[t, k] = dy1[row] @ y1[row]
    order = native_order(problem.up_gate.shape[2], problem.gated)
    result.dw1[expert][:, order] = x.times(rows, dz, "wgrad_dz")
    result.dw2[expert] = dout.times(rows, y1s, "wgrad_y1s").T


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
