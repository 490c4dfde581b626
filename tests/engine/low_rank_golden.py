"""Low-rank adapters of a problem: the golden is that of the layer whose weights have them merged, and
gradients of a and b follow from its weights' by the product rule.
"""

from __future__ import annotations

import numpy as np
from engine.moe_golden import golden, native_order
from framework import numpy, tensor, torch

from sonicmoe.engine.low_rank import Adapters, LowRank

SIZES = {"tokens": 200, "hidden": 256, "intermediate": 192, "experts": 3, "topk": 2, "empty": ()}


class Adapted:
    """A problem with pairs on the projections of `which`: as an engine takes it, and what it means."""

    def __init__(self, problem, *, rank=5, which=("up", "down"), scale=0.7, dtype=None, seed=1):
        dtype = dtype or torch.float32
        rng = np.random.default_rng(seed)
        experts, hidden, n1 = problem.up_gate.shape
        order = native_order(n1, problem.gated)
        shapes = {"up": (hidden, n1), "down": (problem.intermediate, hidden)}
        self.pairs, self.exact, merged = {}, {}, {"up": problem.up_gate, "down": problem.down}
        for name in which:
            inputs, outputs = shapes[name]
            a = rng.standard_normal((experts, rank, inputs)) * inputs**-0.5
            b = rng.standard_normal((experts, outputs, rank)) * 0.5
            a, b = (numpy(tensor(factor, torch.float32).to(dtype)) for factor in (a, b))
            merged[name] = merged[name] + scale * np.einsum("eri,enr->ein", a, b)
            rows = order if name == "up" else list(range(outputs))
            self.exact[name] = a, b
            given = (tensor(factor, torch.float32).to(dtype) for factor in (a, b[:, rows]))
            self.pairs[name] = LowRank(*given, scale)
        self.scale, self.order = scale, order
        self.golden = golden(problem.but(up_gate=merged["up"], down=merged["down"]))

    @property
    def adapters(self):
        return Adapters(self.pairs.get("up"), self.pairs.get("down"))

    def gradients(self):
        """Of every factor, in the order of native rows."""
        found = {}
        for name, (a, b) in self.exact.items():
            of_merged = self.golden.dw1 if name == "up" else self.golden.dw2
            found[f"{name}.a"] = self.scale * np.einsum("enr,ein->eri", b, of_merged)
            db = self.scale * np.einsum("ein,eri->enr", of_merged, a)
            found[f"{name}.b"] = db[:, self.order] if name == "up" else db
        return found
