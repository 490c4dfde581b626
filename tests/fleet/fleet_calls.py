"""Calls of `run_sonic_moe` as PaddleFleet's experts make them, on weights in either layout, and
Fleet's changes to these between calls.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import native_order
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node.node_harness import want_gradient
from weights.freed_memory import free, holds_memory
from weights.weight_sources import native_arrays

from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_copies import clear_all_fp8_weight_caches, quantize_native_fp8_weights

LAYOUTS = ("sonic", "grouped")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def bf16(values):
    return tensor(values, torch.float32).to(torch.bfloat16)


def assert_same(found, wanted):
    """Equal arrays, pair by pair."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


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
        self.layout, arrays = layout, (problem.up_gate, problem.down)
        arrays = native_arrays(*arrays) if layout == "sonic" else arrays
        self.weights = [parameter(np.ascontiguousarray(a, np.float32), self.dtype) for a in arrays]
        for weight in self.weights:
            if main_grad == "weight":
                weight.main_grad = zeros(tuple(weight.shape))
            elif main_grad == "none":
                weight.main_grad = None

    def to_layout(self, layout):
        """Parameters and weight1's `main_grad`, in place, as Fleet does it: assign and reshape. A freed
        parameter only changes its shape.
        """
        if layout == self.layout:
            return
        move, self.layout = MOVES[layout], layout
        for index, weight in enumerate(self.weights):
            if holds_memory(weight):
                overwrite(weight, move(index, numpy(weight)))
            else:
                swap_freed(weight)
        main_grad = getattr(self.weights[0], "main_grad", None)
        if main_grad is not None:
            overwrite(main_grad, move(0, numpy(main_grad)))

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


class FleetExpert(Experts):
    """With FP8 copies on its parameters. form: `fp8_weight_quant_format`."""

    def __init__(self, problem, form="32x32"):
        super().__init__(problem, "grouped")
        self.form = form

    def quant_weight(self):
        self.to_layout("sonic")
        self.clear_fp8_weights()
        with torch.no_grad():
            payload = quantize_native_fp8_weights(*self.weights, iso32=self.form == "32x32")
        for name, weight in zip(("w1", "w2"), self.weights, strict=True):
            codes, scale, *transposed = payload[name]
            if payload["format"] == "iso32":
                transposed = codes.transpose(-2, -1), *transposed
            weight.fp8, weight.transposed_fp8 = (codes, scale), tuple(transposed)

    def clear_fp8_weights(self):
        clear_all_fp8_weight_caches()
        for weight in self.weights:
            weight.fp8 = weight.transposed_fp8 = None

    def forward(self, problem):
        self.to_layout("sonic")
        if any(getattr(weight, "fp8", None) is None for weight in self.weights):
            self.quant_weight()
        return self.call(problem, fp8=True)

    def step_begin(self, has_master=True):
        self.quant_weight()
        if not has_master:
            self.to_layout("grouped")
        free(*self.weights)


def swap_freed(weight):
    """The last two sizes of a parameter without memory."""
    first, rows, columns = (int(size) for size in weight.shape)
    if IS_PADDLE:
        weight.get_tensor()._set_dims([first, columns, rows])
        return
    other = torch.empty((first, columns, rows), dtype=weight.dtype, device=weight.device)
    other.untyped_storage().resize_(0)
    weight.data = other


def write_unseen(weight, array):
    """As the frameworks' optimizers: no version counter moves."""
    value = bf16(np.ascontiguousarray(array))
    if IS_PADDLE:
        value._share_buffer_to(weight)
    else:
        weight.data.copy_(value)


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
