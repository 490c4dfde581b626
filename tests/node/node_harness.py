"""One layer under test: the node on experts of either arrangement, its problem, and what came out,
as numpy arrays.
"""

from __future__ import annotations

import numpy as np
from engine.moe_golden import Result, make_problem, native_order
from framework import numpy, relative_rmse, tensor, torch
from weights.weight_sources import expert_modules, fused_weights, native_arrays, native_weights

from sonicmoe.config import SonicMoEConfig
from sonicmoe.enums import is_glu
from sonicmoe.ernie_compat import SonicMoEMlpNode

ARRANGEMENTS = ("per_expert", "fused", "native")
FULL = SonicMoEConfig(engine="reference")
FP8 = SonicMoEConfig(engine="reference", fp8_mode="perf")


def problems(count, **options):
    """Micro-batches of one layer: other tokens, other routing, the same weights."""
    made = [make_problem(seed=seed, tokens=20 + 7 * seed, **options) for seed in range(count)]
    return [p.but(up_gate=made[0].up_gate, down=made[0].down) for p in made]


def counts_of(problem):
    return [int((problem.indices == e).sum()) for e in range(problem.num_experts)]


class Layer:
    """A node and its parameters, which are one of `ARRANGEMENTS`."""

    def __init__(
        self, problem=None, *, arrangement="per_expert", dtype=None, config=FULL, **options
    ):
        self.problem = problem or make_problem()
        self.arrangement, self.dtype = arrangement, dtype or torch.float32
        p = self.problem
        if arrangement == "fused":
            self.weights = list(fused_weights(p.up_gate, p.down, self.dtype))
            self.node = SonicMoEMlpNode.from_fused(
                *self.weights, p.activation, config=config, **options
            )
        elif arrangement == "native":
            self.weights = list(native_weights(p.up_gate, p.down, self.dtype, p.activation))
            self.node = SonicMoEMlpNode.from_native(
                *self.weights, p.activation, config=config, **options
            )
        else:
            self.experts = expert_modules(p.up_gate, p.down, self.dtype)
            self.weights = [e.up_gate_proj.weight for e in self.experts] + [
                e.down_proj.weight for e in self.experts
            ]
            sizes = {
                "n_experts": p.num_experts,
                "hidden_size": p.x.shape[1],
                "intermediate_size": p.intermediate,
            }
            self.node = SonicMoEMlpNode(
                self.experts, **sizes, activation_type=p.activation, config=config, **options
            )

    def call(self, problem=None, *, x_grad=True, probs_grad=True, counts="list", index_dtype=None):
        return Call(
            self, problem or self.problem, x_grad, probs_grad, counts, index_dtype or torch.int64
        )

    def run(self, problem=None, **options):
        """Forward and backward of one micro-batch."""
        call = self.call(problem, **options)
        call.backward()
        return call

    def set_main_grad(self, value):
        """A private fp32 `main_grad` full of `value`, or None, on every weight."""
        for weight in self.weights:
            weight.main_grad = (
                None
                if value is None
                else tensor(np.full(tuple(weight.shape), value), torch.float32)
            )
        return [weight.main_grad for weight in self.weights]

    def gradients(self, attribute):
        """`(dw1, dw2)` stacked over experts, `[E, H, N1]` split-half and `[E, I, H]`."""
        arrays = [numpy(getattr(weight, attribute)) for weight in self.weights]
        if self.arrangement == "native":
            dw1, dw2 = (array.transpose(0, 2, 1) for array in arrays)
            rows = native_order(dw1.shape[2], is_glu(self.problem.activation))
            return [dw1[:, :, np.argsort(rows)], dw2]
        if self.arrangement == "fused":
            return arrays
        half = len(arrays) // 2
        return [np.stack(arrays[:half]), np.stack(arrays[half:])]

    def result(self, call, attribute="main_grad") -> Result:
        return Result(numpy(call.out), call.dx, call.dprobs, *self.gradients(attribute))

    def overwrite(self, problem):
        """Other values into the same parameters, in place, as an optimizer does."""
        arrays = [*problem.up_gate, *problem.down]
        if self.arrangement == "fused":
            arrays = [problem.up_gate, problem.down]
        elif self.arrangement == "native":
            arrays = native_arrays(problem.up_gate, problem.down, problem.activation)
        with torch.no_grad():
            for weight, array in zip(self.weights, arrays, strict=True):
                weight.copy_(tensor(array, torch.float32).to(weight.dtype))


class Call:
    """One forward whose backward is still to come."""

    def __init__(self, layer, problem, x_grad, probs_grad, counts, index_dtype):
        self.problem = problem
        self.x = tensor(problem.x, torch.float32).to(layer.dtype)
        self.probs = tensor(problem.probs, torch.float32)
        for leaf, wanted in ((self.x, x_grad), (self.probs, probs_grad)):
            want_gradient(leaf, wanted)
        self.indices = tensor(problem.indices).to(index_dtype)
        self.dout = tensor(problem.dout, torch.float32).to(layer.dtype)
        given = counts_of(problem)
        self.counts = {"list": given, "none": None, "empty": [], "tensor": tensor(given)}[counts]
        self.out = layer.node(self.x, self.counts, self.indices, self.probs)

    def backward(self, **options):
        self.out.backward(self.dout, **options)
        return self

    @property
    def dx(self):
        return None if self.x.grad is None else numpy(self.x.grad)

    @property
    def dprobs(self):
        return None if self.probs.grad is None else numpy(self.probs.grad)


def want_gradient(leaf, wanted):
    """Both frameworks' spelling of whether autograd wants a gradient."""
    if hasattr(leaf, "stop_gradient"):
        leaf.stop_gradient = not wanted
    else:
        leaf.requires_grad_(wanted)


def has_gradient_path(value):
    return not value.stop_gradient if hasattr(value, "stop_gradient") else value.requires_grad


def assert_close(actual: Result, expected: Result, bound=1e-5):
    for name, got in actual.items():
        error = relative_rmse(got, getattr(expected, name))
        assert error <= bound, f"{name}: {error}"


def summed(results):
    """dw1 and dw2 over micro-batches."""
    results = list(results)
    return [sum(getattr(r, name) for r in results) for name in ("dw1", "dw2")]
