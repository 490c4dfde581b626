"""Training steps in the order of PaddleFleet's callback, on `run_sonic_moe`, in either framework."""

from __future__ import annotations

import numpy as np
from fleet.fleet_calls import Experts, overwrite, to_grouped, to_sonic
from framework import IS_PADDLE, numpy, tensor, torch
from weights.freed_memory import free, holds_memory, restore

from sonicmoe.fleet.weight_copies import (
    clear_all_fp8_weight_caches,
    quantize_native_fp8_weights,
)

ATTRIBUTES = ("fp8", "transposed_fp8")


class FleetExpert(Experts):
    """Fleet's expert: its parameters, and what it does to them at each event.

    form: `fp8_weight_quant_format`.
    """

    def __init__(self, problem, form="32x32", **options):
        super().__init__(problem, "grouped", **options)
        self.form, self.micro_batches, self.forwards = form, 9999, 0
        self.masters = [weight.detach().to(torch.float32).clone() for weight in self.weights]

    def to_layout(self, layout):
        """Parameters and weight1's `main_grad`; a freed parameter only changes its shape."""
        if layout == self.layout:
            return
        move = to_sonic if layout == "sonic" else to_grouped
        for index, weight in enumerate(self.weights):
            if holds_memory(weight):
                overwrite(weight, move(index, numpy(weight)))
            else:
                swap_freed(weight)
            main_grad = getattr(weight, "main_grad", None)
            if index == 0 and main_grad is not None:
                overwrite(main_grad, move(0, numpy(main_grad)))
        self.layout = layout

    def quant_weight(self):
        self.to_layout("sonic")
        self.clear_fp8_weights()
        with torch.no_grad():
            payload = quantize_native_fp8_weights(*self.weights, iso32=self.form == "32x32")
        for name, weight in zip(("w1", "w2"), self.weights, strict=True):
            if payload["format"] == "iso32":
                codes, scale, transposed_scale = payload[name]
                transposed = codes.transpose(-2, -1)
            else:
                codes, scale, transposed, transposed_scale = payload[name]
            weight.fp8, weight.transposed_fp8 = (codes, scale), (transposed, transposed_scale)
        self.forwards = 0
        return payload

    def clear_fp8_weights(self):
        clear_all_fp8_weight_caches()
        for weight in self.weights:
            weight.fp8 = weight.transposed_fp8 = None

    def needs_quantising(self):
        return any(getattr(w, name, None) is None for w in self.weights for name in ATTRIBUTES)

    def forward(self, problem):
        self.to_layout("sonic")
        if self.needs_quantising():
            self.quant_weight()
        releases = self.form == "1x32" and self.forwards >= self.micro_batches - 1
        call = self.call(problem, fp8=True, release_fp8_weights=releases)
        if releases:
            for weight in self.weights:
                weight.fp8 = None
        self.forwards += 1
        return call

    # The callback and the optimizer.
    def step_begin(self, has_master=True):
        self.quant_weight()
        if not has_master:
            self.to_layout("grouped")
        free(*self.weights)

    def optimizer_begin(self):
        self.clear_fp8_weights()
        self.to_layout("grouped")

    def optimizer_step(self):
        """SGD on fp32 masters, which writes the parameters through new memory if they were freed."""
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            gradient = numpy(weight.main_grad)
            if tuple(gradient.shape) != tuple(master.shape):
                gradient = to_grouped(index, gradient)
            master.subtract_(tensor(0.5 * gradient, torch.float32)) if IS_PADDLE else master.sub_(
                tensor(0.5 * gradient, torch.float32)
            )
            value = master.to(weight.dtype)
            if holds_memory(weight):
                write_unseen(weight, value)
            else:
                restore(weight, value)
            weight.main_grad.zero_()


def write_unseen(weight, value):
    """As the frameworks' optimizers: no version counter moves."""
    if IS_PADDLE:
        value._share_buffer_to(weight)
    else:
        weight.data.copy_(value)


def swap_freed(weight):
    """The last two sizes of a parameter without memory."""
    first, rows, columns = (int(size) for size in weight.shape)
    if IS_PADDLE:
        weight.get_tensor()._set_dims([first, columns, rows])
        return
    other = torch.empty((first, columns, rows), dtype=weight.dtype, device=weight.device)
    other.untyped_storage().resize_(0)
    weight.data = other


def same_bits(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))
