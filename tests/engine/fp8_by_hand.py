"""The FP8 recipe applied by hand: one expert after the other, every operand quantised and
dequantised where the recipe says so.

An independent second implementation of what the reference engine emulates. It shares the quantiser
with the package (which has tests of its own) and nothing else. `skip` leaves a named quantisation
out, which shows that a test would notice.
"""

from __future__ import annotations

import numpy as np
from engine.moe_golden import Result, base_of, each, native_order, native_weights, slope, value
from framework import numpy, tensor, torch

from sonicmoe.enums import ZCode
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
    """Arguments of one computation."""

    def __init__(self, settings, dtype, skip=(), exact=False):
        self.settings, self.recipe, self.dtype, self.skip, self.exact = (
            settings,
            settings.recipe,
            dtype,
            set(skip),
            exact,
        )

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

    def operand(self, array, name):
        """A GEMM operand after the quantisation `name`."""
        unquantised = self.recipe is None or (
            name.startswith("wgrad") and not self.settings.fp8_wgrad
        )
        if unquantised:
            return self.rounded(array)
        if name in self.skip:
            return array
        return numpy(
            dequantize(
                quantize(
                    self.fp32(array),
                    getattr(self.recipe, name),
                    Code.E4M3,
                    self.recipe.scale_format,
                )
            )
        )

    def row_scale(self, array, name):
        """The largest scale of every row of x or dout."""
        q = quantize(
            self.fp32(array), getattr(self.recipe, name), Code.E4M3, self.recipe.scale_format
        )
        return numpy(q.scale_inv).max(1)

    def codes(self, array, name, scale):
        """x or dout over its rows' scales, on the grid of e4m3: its codes, and those of blocks with
        a scale of their own rounded once more.
        """
        values = self.operand(array, name) / scale[:, None]
        return numpy(tensor(values, torch.float32).to(torch.float8_e4m3fn).to(torch.float32))

    def stored_z(self, z):
        """z as backward reads it."""
        if "z" in self.skip:
            return z
        if self.recipe is None:
            return self.rounded(z)
        if self.settings.save_z is ZCode.BF16:
            return numpy(self.fp32(z).to(torch.bfloat16))
        code = {ZCode.INT8: Code.INT8, ZCode.E4M3: Code.E4M3}[self.settings.save_z]
        return numpy(
            dequantize(quantize(self.fp32(z), self.recipe.z, code, self.recipe.scale_format))
        )


def activation_of(problem, z):
    """`(y1, gate value, gate slope, up)` of interleaved (or ungated) `z`."""
    act = base_of(problem.activation)
    gate, up = (z[:, 0::2], z[:, 1::2]) if problem.gated else (z, np.ones_like(z))
    a = each(value, act, gate.ravel()).reshape(gate.shape)
    da = each(slope, act, gate.ravel()).reshape(gate.shape)
    return a * up, a, da, up


def by_hand(
    problem, settings, dtype, skip=(), exact=False, row_scale=None, dout_scale=None
) -> Result:
    """`row_scale [T]`: x is one scale per token times its codes, and wgrad multiplies the codes;
    `dout_scale`: the same of dout. A recipe that folds has them of its own.
    """
    hand = Hand(settings, dtype, skip, exact)
    folds = settings.recipe is not None and settings.recipe.folds_wgrad and settings.fp8_wgrad
    if folds and row_scale is None:
        row_scale = hand.row_scale(problem.x, "x")
    if folds and dout_scale is None:
        dout_scale = hand.row_scale(problem.dout, "dout")
    alignment = settings.row_alignment
    w1, w2, _, _ = native_weights(problem)
    x_operand, dout_operand = hand.operand(problem.x, "x"), hand.operand(problem.dout, "dout")
    result = Result(
        *(
            np.zeros_like(a)
            for a in (problem.x, problem.x, problem.probs, problem.up_gate, problem.down)
        )
    )
    order = native_order(problem.up_gate.shape[2], problem.gated)
    for e in range(problem.num_experts):
        pairs = [
            (t, k) for t, k in np.ndindex(*problem.indices.shape) if problem.indices[t, k] == e
        ]
        if not pairs:
            continue
        tokens = [t for t, _ in pairs]
        n, padded = len(pairs), -(-len(pairs) // alignment) * alignment

        def rows(source, tokens=tokens, n=n, padded=padded):
            made = np.zeros((padded, source.shape[1]))
            made[:n] = source[tokens]
            return made

        def read(name, quantised, rows=rows):
            """x or dout as its GEMM reads it: blocks of several rows are cut after the gather."""
            in_order = hand.recipe is not None and getattr(hand.recipe, name).rows > 1
            return hand.operand(rows(getattr(problem, name)), name) if in_order else rows(quantised)

        p = np.zeros((padded, 1))
        p[:n, 0] = [problem.probs[pair] for pair in pairs]

        z = read("x", x_operand) @ hand.operand(w1[e], "w1").T
        y1 = hand.operand(activation_of(problem, z)[0], "y1")
        y2 = hand.rounded(y1 @ hand.operand(w2[e], "w2").T)

        y1, a, da, up = activation_of(problem, hand.stored_z(z))
        dy1 = read("dout", dout_operand) @ hand.operand(w2[e], "w2_dgrad")
        dgate, dup = p * dy1 * up * da, p * dy1 * a
        dz = np.stack([dgate, dup], -1).reshape(padded, -1) if problem.gated else dgate
        y1s = p * y1
        if hand.recipe is not None and hand.recipe.rounds_rows:
            dz, y1s = hand.rounded(dz), hand.rounded(y1s)
        dx_rows = hand.rounded(hand.operand(dz, "dz") @ hand.operand(w1[e], "w1_dgrad"))
        for row, (t, k) in enumerate(pairs):
            result.out[t] += p[row, 0] * y2[row]
            result.dx[t] += dx_rows[row]
            result.dprobs[t, k] = dy1[row] @ y1[row]

        def product(given, name, scale, beside, other, rows=rows, tokens=tokens, n=n):
            if scale is None:
                return hand.operand(rows(given), name).T @ hand.operand(beside, other)
            s = np.ones((len(beside), 1))
            s[:n, 0] = scale[tokens]
            operand = name.removeprefix("wgrad_")
            codes = hand.codes(given, operand, scale) if folds else given / scale[:, None]
            return rows(codes).T @ hand.operand(beside * s, other)

        dw2 = product(problem.dout, "wgrad_dout", dout_scale, y1s, "wgrad_y1s")
        dw1 = product(problem.x, "wgrad_x", row_scale, dz, "wgrad_dz").T
        result.dw1[e][:, order] = dw1.T
        result.dw2[e] = dw2.T
    result.out, result.dx = hand.rounded(result.out), hand.rounded(result.dx)
    return result
