"""FP8 copies on PaddleFleet's attributes, through the whole order of its events; its layouts."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import Experts, FleetExpert, assert_same, swap_freed, write_unseen
from framework import IS_PADDLE, numpy, tensor, torch
from weights.freed_memory import holds_memory

from sonicmoe.fleet.layer import known_layer, weights_changed
from sonicmoe.fleet.weight_copies import (
    clear_all_fp8_weight_caches,
    copies_of,
    quantize_native_fp8_weights,
)
from sonicmoe.fleet.weight_layout import (
    fused_grouped_w1_to_sonic,
    fused_sonic_w1_to_grouped,
    fused_transpose_w2_layout,
)
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.gpu import W1_BLOCK, W2_BLOCK
from sonicmoe.quant.reference import dequantize

FORMATS = ("32x32", "1x32")
each_format = pytest.mark.parametrize("form", FORMATS)
LARGE = {"hidden": 144, "intermediate": 136}  # partial blocks at both edges


@pytest.fixture
def quantised():
    """An expert whose copies hang on its parameters."""
    expert = FleetExpert(make_problem())
    expert.quant_weight()
    return expert


class TestOrderOfEvents:
    @each_format
    def test_a_callback_that_never_runs_is_replaced_by_the_forwards(self, form, caplog):
        """Fleet asks for the attributes' presence only; what hangs there is of the step before."""
        batch = make_problem()
        plain, expert = FleetExpert(batch), FleetExpert(batch, form)
        for _ in range(3):
            calls = plain.call(fp8=True).backward(), expert.forward(batch).backward()
            assert_same(calls[1].arrays, calls[0].arrays)
            expert.to_layout("grouped")
            assert_same(expert.gradients(), plain.gradients())
            for experts in (plain, expert):
                for weight in experts.weights:
                    write_unseen(weight, 1.5 * numpy(weight))
        # docs/weights.md: copies that are made again say so, in a line of the log.
        again = "FP8 copies of expert weights were made again: "
        others = [line for line in caplog.messages if not line.startswith(again)]
        assert not [line for line in others if "step()" in line or "weights" in line]

    @each_format
    def test_memory_goes_with_the_attributes(self, form):
        batch = make_problem()
        expert = FleetExpert(batch, form)
        expert.step_begin()
        expert.forward(batch).backward()
        copies = copies_of(*expert.weights)
        buffers = [weakref.ref(copies.weights.w1), weakref.ref(copies.weights.w2_dgrad)]
        del copies
        gc.collect()
        gc.disable()
        try:
            expert.clear_fp8_weights()
            # Without a collection of cycles.
            assert [buffer() for buffer in buffers] == [None, None]
        finally:
            gc.enable()


class TestAttributes:
    def test_parameters_that_are_copied_or_saved_leave_them_behind(self, quantised, tmp_path):
        for weight in quantised.weights:
            assert getattr(copy.deepcopy(weight), "fp8", None) is None
        if not IS_PADDLE:  # which saves values alone
            with pytest.raises(TypeError, match=r"belong to this process; .*fp8 = None"):
                torch.save(quantised.weights[0], tmp_path / "weight")

    @pytest.mark.parametrize("missing", [0, 1])
    def test_nothing_at_first_and_half_of_a_pair_are_none(self, quantised, missing):
        assert copies_of(*FleetExpert(make_problem()).weights) is None
        quantised.weights[missing].fp8 = None
        assert copies_of(*quantised.weights) is None


class TestPayload:
    @pytest.mark.parametrize("layout", ["sonic", "grouped"])
    @each_format
    def test_shapes_and_values(self, layout, form):
        problem = make_problem(**LARGE)
        experts, hidden, inner = problem.num_experts, 144, 136
        given = Experts(problem, layout)
        native = Experts(problem, "sonic").weights
        payload = quantize_native_fp8_weights(*given.weights, iso32=form == "32x32")
        assert payload["format"] == ("iso32" if form == "32x32" else "1x32")
        shapes = {"w1": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
        for (name, shape), weight in zip(shapes.items(), native, strict=True):
            codes, scale, *transposed = payload[name]
            assert tuple(codes.shape) == shape and codes.dtype == torch.float8_e4m3fn
            block = W1_BLOCK if name == "w1" else W2_BLOCK
            values = dequantize(BlockScaledTensor(codes, scale, block, Code.E4M3))
            error = np.abs(numpy(values) - numpy(weight)).max() / np.abs(numpy(weight)).max()
            assert 0 < error < 0.04
            assert np.array_equal(numpy(transposed[-1]), numpy(scale).transpose(0, 2, 1))
            if form == "1x32":
                back = BlockScaledTensor(*transposed, block, Code.E4M3, Orientation.COLUMNS)
                assert tuple(transposed[0].shape) == (shape[0], shape[2], shape[1])
                assert np.array_equal(numpy(dequantize(back)), numpy(values))


def test_clearing_frees_what_the_engine_quantised_by_itself(weights_on_a_gpu):
    expert = FleetExpert(make_problem())
    expert.call(fp8=True)
    weights_changed(*expert.weights)
    expert.call(fp8=True)
    prepared = known_layer(*expert.weights).state.bound._prepared
    buffer = weakref.ref(prepared.weights.w1)
    del prepared
    clear_all_fp8_weight_caches()
    gc.collect()
    assert buffer() is None
    expert.call(fp8=True).backward()


def test_a_freed_parameter_that_changes_its_shape_is_read_in_its_new_layout():
    batch = make_problem()
    expert = FleetExpert(batch)
    expected = numpy(expert.call(fp8=True).out)
    expert.step_begin(has_master=False)
    assert expert.layout == "grouped" and not any(map(holds_memory, expert.weights))
    assert np.array_equal(numpy(expert.call(fp8=True).out), expected), "grouped and freed"
    for weight in expert.weights:
        swap_freed(weight)
    assert np.array_equal(numpy(expert.call(fp8=True).out), expected)


# Layouts.

E, H, I = 3, 5, 4


def numbered(*shape, dtype=torch.float32):
    return tensor(np.arange(np.prod(shape)).reshape(shape) % 251, torch.float32).to(dtype)


def raw(value):
    """The bytes of a tensor."""
    return numpy(value.contiguous().view(torch.uint8).to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_round_trips_are_exact(dtype):
    grouped, sonic = numbered(E, H, 2 * I, dtype=dtype), numbered(E, 2 * I, H, dtype=dtype)
    down = numbered(E, I, H, dtype=dtype)
    for there, back, value in (
        (fused_grouped_w1_to_sonic, fused_sonic_w1_to_grouped, grouped),
        (fused_sonic_w1_to_grouped, fused_grouped_w1_to_sonic, sonic),
        (fused_transpose_w2_layout, fused_transpose_w2_layout, down),
    ):
        moved = there(value)
        assert moved.dtype == dtype and moved.is_contiguous()
        assert not np.array_equal(raw(moved), raw(value))
        assert np.array_equal(raw(back(moved)), raw(value))
