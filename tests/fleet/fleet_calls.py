"""Calls of `run_sonic_moe` as PaddleFleet's experts make them, on weights in either layout."""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import Result, native_order
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node.node_harness import want_gradient
from weights.weight_sources import native_arrays

from sonicmoe.fleet.run import run_sonic_moe

LAYOUTS = ("sonic", "grouped")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def bf16(values):
    return tensor(values, torch.float32).to(torch.bfloat16)


def assert_same(found, wanted):
    """Equal arrays, pair by pair."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def arrays_in(layout, up_gate, down):
    """Weights or gradients `[E, H, 2I]`, `[E, I, H]` in a layout."""
    return native_arrays(up_gate, down) if layout == "sonic" else (up_gate, down)


def to_grouped(index, array):
    """The first or second weight's array, from Sonic's layout."""
    swapped = array.transpose(0, 2, 1)
    if index:
        return swapped
    return swapped[:, :, np.argsort(native_order(swapped.shape[2], True))]


def to_sonic(index, array):
    """The same from the grouped layout."""
    swapped = array.transpose(0, 2, 1)
    return swapped[:, native_order(swapped.shape[1], True)] if index == 0 else swapped


MOVES = {"grouped": to_grouped, "sonic": to_sonic}


class Experts:
    """Two parameters, and calls on them. main_grad: "weight" (zeros in the weight's shape), "none"
    (the attribute is None), or "absent".
    """

    def __init__(self, problem, layout="sonic", *, main_grad="weight", dtype=None, **given):
        self.problem, self.dtype, self.given = problem, dtype or torch.bfloat16, given
        self.layout = layout
        arrays = arrays_in(layout, problem.up_gate, problem.down)
        self.weights = [parameter(np.ascontiguousarray(a, np.float32), self.dtype) for a in arrays]
        for weight in self.weights:
            if main_grad == "weight":
                weight.main_grad = zeros(tuple(weight.shape))
            elif main_grad == "none":
                weight.main_grad = None

    def convert(self, layout):
        """The parameters into the other layout, in place, as Fleet does it: assign and reshape."""
        if layout != self.layout:
            move = MOVES[layout]
            for index, weight in enumerate(self.weights):
                overwrite(weight, move(index, numpy(weight)))
            self.layout = layout

    def call(self, problem=None, **given):
        return Call(self, problem or self.problem, **(self.given | given))

    def gradients(self):
        """`main_grad`, or `.grad`, of both weights as grouped arrays, by their shapes."""
        found = []
        for index, weight in enumerate(self.weights):
            held = weight.main_grad if hasattr(weight, "main_grad") else weight.grad
            array = numpy(held)
            wanted = (self.problem.up_gate, self.problem.down)[index].shape
            found.append(array if array.shape == wanted else to_grouped(index, array))
        return found

    def result(self, call) -> Result:
        return Result(numpy(call.out), call.dx, call.dprobs, *self.gradients())


def zeros(shape):
    return tensor(np.zeros(shape), torch.float32)


def overwrite(held, array):
    """Other values, and perhaps another shape, in the same memory of the same tensor."""
    value = tensor(np.ascontiguousarray(array), torch.float32).to(held.dtype)
    with torch.no_grad():
        if IS_PADDLE:
            import paddle

            held.reshape_(list(value.shape))
            paddle.assign(value, output=held)
        else:
            held.data = held.data.view(value.shape).copy_(value)


class Call:
    """One forward whose backward is still to come."""

    def __init__(
        self, experts, p, *, x=None, scores_grad=True, scores_dtype=torch.float32, **given
    ):  # fmt: skip
        self.problem, self.x = p, x
        if x is None:
            self.x = tensor(p.x, torch.float32).to(experts.dtype)
            want_gradient(self.x, True)
        self.scores = tensor(p.probs, torch.float32).to(scores_dtype)
        want_gradient(self.scores, scores_grad)
        self.dout = tensor(p.dout, torch.float32).to(experts.dtype)
        indices = tensor(p.indices).to(torch.int64)
        topk, experts_here = p.indices.shape[1], p.num_experts
        arguments = (self.x, indices, self.scores, topk, experts_here, *experts.weights)
        self.out = run_sonic_moe(*arguments, **given)

    def backward(self):
        self.out.backward(self.dout)
        return self

    @property
    def dx(self):
        return numpy(self.x.grad)

    @property
    def dprobs(self):
        return numpy(self.scores.grad)

    @property
    def arrays(self):
        """Of the output and of both gradients."""
        return [numpy(self.out), self.dx, self.dprobs]
