"""One layer under test: the node on experts of either arrangement, its problem, and what came out,
as numpy arrays.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from engine.moe_golden import Result, golden, make_problem, native_order
from framework import IS_PADDLE, numpy, recomputed, relative_rmse, tensor, torch, want_gradient  # noqa: F401
from weights.weight_sources import expert_modules, fused_weights, native_arrays, native_weights

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import is_glu
from sonicmoe.ernie_compat import SonicMoEMlpNode

ARRANGEMENTS = ("per_expert", "fused", "native")
FLUSHES = ("auto", "step")
FULL = SonicMoEConfig(engine="reference")
FP8 = SonicMoEConfig(engine="reference", fp8_mode="perf")
CONFIGS = {"full": FULL, "fp8": FP8}


def problems(count, **options):
    """Micro-batches of one layer: other tokens, other routing, the same weights."""
    made = [make_problem(seed=seed, tokens=20 + 7 * seed, **options) for seed in range(count)]
    return [p.but(up_gate=made[0].up_gate, down=made[0].down) for p in made]


def counts_of(problem):
    return [int((problem.indices == e).sum()) for e in range(problem.num_experts)]


class Layer:
    """A node and its parameters, which are one of `ARRANGEMENTS`.

    main_grad: a value that fills it, or None; "absent": parameters without that attribute.
    """

    def __init__(
        self,
        problem=None,
        *,
        arrangement="per_expert",
        dtype=None,
        main_grad="absent",
        config=FULL,
        **options,
    ):
        p = self.problem = problem or make_problem()
        self.arrangement, self.dtype = arrangement, dtype or torch.float32
        self.options = {"config": config, **options}
        if arrangement == "per_expert":
            self.experts = expert_modules(p.up_gate, p.down, self.dtype)
            self.weights = [e.up_gate_proj.weight for e in self.experts]
            self.weights += [e.down_proj.weight for e in self.experts]
        elif arrangement == "fused":
            self.weights = list(fused_weights(p.up_gate, p.down, self.dtype))
        else:
            self.weights = list(native_weights(p.up_gate, p.down, self.dtype, p.activation))
        self.node = self.another_node()
        if main_grad != "absent":
            self.set_main_grad(main_grad)

    def another_node(self, **options):
        """Over the same parameters."""
        p, options = self.problem, self.options | options
        if self.arrangement != "per_expert":
            make = getattr(SonicMoEMlpNode, f"from_{self.arrangement}")
            return make(*self.weights, p.activation, **options)
        sizes = p.num_experts, p.x.shape[1], p.intermediate
        return SonicMoEMlpNode(self.experts, *sizes, p.activation, **options)

    def call(self, problem=None, **options):
        """A forward; `options` of `Call`."""
        return Call(self, problem or self.problem, **options)

    def run(self, problem=None, **options):
        """Forward and backward of one micro-batch."""
        return self.call(problem, **options).backward()

    def step(self, *batches, **options):
        """`run` every micro-batch (None: the layer's own), then `node.step()`; the last call."""
        for problem in batches or (None,):
            call = self.run(problem, **options)
        self.node.step()
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

    def zero_main_grad(self):
        """In place, as an optimizer does."""
        with torch.no_grad():
            for weight in self.weights:
                weight.main_grad.zero_()

    def gradients(self, attribute="main_grad"):
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

    def error(self, *batches, times=1, held=0.0, attribute="main_grad"):
        """How far the weight gradients are from `times` the exact ones of these micro-batches (none:
        of the layer's own) on top of `held`.
        """
        wanted = summed(map(golden, batches or (self.problem,)))
        pairs = zip(self.gradients(attribute), wanted, strict=True)
        return max(relative_rmse(got, times * want + held) for got, want in pairs)

    def has_gradients(self):
        """Whether any `main_grad` holds something."""
        held = [weight.main_grad for weight in self.weights]
        return any(gradient is not None and numpy(gradient).any() for gradient in held)

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
    """One forward whose backward is still to come.

    counts: how `tokens_per_expert` is spelt. given: further arguments of the node.
    """

    def __init__(
        self,
        layer,
        problem,
        *,
        x_grad=True,
        probs_grad=True,
        counts="list",
        **given,
    ):
        self.problem = problem
        self.x = tensor(problem.x, torch.float32).to(layer.dtype)
        self.probs = tensor(problem.probs, torch.float32)
        for leaf, wanted in ((self.x, x_grad), (self.probs, probs_grad)):
            want_gradient(leaf, wanted)
        self.indices = tensor(problem.indices).to(torch.int64)
        self.dout = tensor(problem.dout, torch.float32).to(layer.dtype)
        self.counts = counts_of(problem) if counts == "list" else None
        self.out = layer.node(*self.arguments, **given)

    @property
    def arguments(self):
        """Of the node."""
        return self.x, self.counts, self.indices, self.probs

    def backward(self, **options):
        self.out.backward(self.dout, **options)
        return self

    @property
    def dx(self):
        return None if self.x.grad is None else numpy(self.x.grad)

    @property
    def dprobs(self):
        return None if self.probs.grad is None else numpy(self.probs.grad)


@contextmanager
def no_room(half_way=False):
    """A backward in this block finds no memory for weight gradients, or half way none for dw1."""
    add = ReferenceEngine.backward_dw

    def fail(self, pending, targets):
        if half_way:
            add(self, pending, targets)
            targets.adding = True
        raise MemoryError("no room for dw1")

    # What Paddle makes of an error in a backward is an OSError.
    refused = pytest.raises((MemoryError, OSError), match="no room for dw1")
    with mock.patch.object(ReferenceEngine, "backward_dw", fail), refused:
        yield


def has_gradient_path(value):
    return not value.stop_gradient if hasattr(value, "stop_gradient") else value.requires_grad


def assert_close(actual: Result, expected: Result, bound=1e-5):
    for name, got in actual.items():
        error = relative_rmse(got, getattr(expected, name))
        assert error <= bound, f"{name}: {error}"


def assert_equal(arrays, wanted):
    """The same bits everywhere."""
    for index, (got, want) in enumerate(zip(arrays, wanted, strict=True)):
        assert np.array_equal(got, want), index


def summed(results):
    """dw1 and dw2 over micro-batches."""
    results = list(results)
    return [sum(getattr(r, name) for r in results) for name in ("dw1", "dw2")]


def gradients_of(call, inputs):
    """`torch.autograd.grad` or `paddle.grad`."""
    if not IS_PADDLE:
        return torch.autograd.grad(call.out, inputs, call.dout, allow_unused=True)
    import paddle

    return paddle.grad(call.out, inputs, grad_outputs=[call.dout], allow_unused=True)
