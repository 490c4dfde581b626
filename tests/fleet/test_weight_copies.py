"""FP8 copies on PaddleFleet's attributes, through the whole order of its events."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import numpy as np
import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import Experts
from fleet.fleet_steps import FleetExpert, same_bits, swap_freed, train
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import problems
from pairwise import pairwise
from weights.freed_memory import free, holds_memory

from sonicmoe.errors import LayoutError, ShapeError, StaleWeightsError
from sonicmoe.fleet.layer import known_layer, weights_changed
from sonicmoe.fleet.weight_copies import (
    clear_all_fp8_weight_caches,
    copies_of,
    quantize_native_fp8_weights,
)
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.gpu import W1_BLOCK, W2_BLOCK
from sonicmoe.quant.reference import dequantize

FORMATS = ("32x32", "1x32")
each_format = pytest.mark.parametrize("form", FORMATS)
LARGE = {"hidden": 144, "intermediate": 136}  # partial blocks at both edges


@functools.cache
def plain_training(count):
    """Without copies and without freeing: parameters in grouped layout, quantised by the node.
    Returns the batches, and every array that the steps leave.
    """
    batches = problems(count)
    expert = FleetExpert(batches[0])
    return batches, steps_of(expert, batches, lambda batch: expert.call(batch, fp8=True))


def steps_of(expert, batches, forward):
    found = []
    for _ in range(3):
        calls = [forward(batch) for batch in batches]
        for call in calls:
            found += call.backward().arrays
        expert.to_layout("grouped")
        found += expert.gradients()
        expert.optimizer_step()
        found += [numpy(weight) for weight in expert.weights]
    return found


@pytest.fixture
def quantised():
    """An expert whose copies hang on its parameters."""
    expert = FleetExpert(make_problem())
    expert.quant_weight()
    return expert


class TestOrderOfEvents:
    @pytest.mark.parametrize(
        ("form", "has_master", "frees"), pairwise(FORMATS, [False, True], [False, True])
    )
    def test_bits_are_those_of_training_without_it(self, form, has_master, frees):
        batches, wanted = plain_training(3)
        found = train(FleetExpert(batches[0], form), batches, frees=frees, has_master=has_master)
        assert same_bits(found, wanted)

    @each_format
    def test_a_callback_that_never_runs_is_replaced_by_the_forwards(self, form, caplog):
        """Fleet asks for the attributes' presence only; what hangs there is of the step before."""
        batches, wanted = plain_training(2)
        expert = FleetExpert(batches[0], form)
        assert same_bits(steps_of(expert, batches, expert.forward), wanted)
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
            expert.optimizer_begin()
            # Without a collection of cycles.
            assert [buffer() for buffer in buffers] == [None, None]
        finally:
            gc.enable()


class TestStaleness:
    def freed(self, expert):
        expert.to_layout("sonic")
        free(*expert.weights)
        return expert

    def test_an_announced_write(self, quantised):
        weights_changed(*quantised.weights)
        with pytest.raises(StaleWeightsError, match=r"announced a write; .* hold no memory"):
            self.freed(quantised).forward(quantised.problem)

    def test_clearing_after_a_backward_ends_what_the_backward_has_read(self, quantised):
        """The trainer clears caches before its optimizer, and forgets the attributes."""
        quantised.forward(quantised.problem).backward()
        clear_all_fp8_weight_caches()
        with pytest.raises(StaleWeightsError, match="clear_all_fp8_weight_caches"):
            self.freed(quantised).forward(quantised.problem)

    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_layer_that_the_callback_does_not_reach(self, layers):
        """Its attributes stay, and the optimizer frees its storage with that of the others."""
        batch = make_problem()
        unreached, *others = (FleetExpert(batch) for _ in range(1 + layers))
        for expert in (unreached, *others):
            expert.step_begin()
            expert.forward(batch).backward()
        for expert in others:
            expert.optimizer_begin()
        for expert in others:
            expert.optimizer_step()
            expert.step_begin()
        with pytest.raises(StaleWeightsError, match="clear_all_fp8_weight_caches"):
            unreached.forward(batch)

    def test_no_copies_and_no_memory(self, quantised):
        quantised.clear_fp8_weights()
        self.freed(quantised)
        with pytest.raises(LayoutError, match=r"hold no memory; .*FP8 copies"):
            quantised.call(fp8=True)
        with pytest.raises(LayoutError, match="hold no memory"):
            quantised.quant_weight()


class TestAttributes:
    def test_copies_of_somebody_else_are_refused(self, quantised):
        w1, _ = quantised.weights
        w1.fp8 = (w1.fp8[0].clone() if not IS_PADDLE else tensor(np.zeros(3)), w1.fp8[1])
        with pytest.raises(LayoutError, match=r"w1\.fp8 holds .* has not made"):
            quantised.forward(quantised.problem)

    def test_copies_of_two_events_are_refused(self, quantised):
        w1, _ = quantised.weights
        first = w1.fp8
        quantised.quant_weight()
        w1.fp8 = first
        with pytest.raises(LayoutError, match="two quantisations"):
            quantised.forward(quantised.problem)

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

    def test_weights_that_are_no_pair_are_refused(self):
        expert = FleetExpert(make_problem())
        w1, w2 = expert.weights
        with pytest.raises(ShapeError, match=r"needed: \[E, 2I, H\] and \[E, H, I\]"):
            quantize_native_fp8_weights(w2, w1)
        with pytest.raises(ShapeError, match="w1 has shape"):
            quantize_native_fp8_weights(tensor(np.zeros((3, 4))), w2)
        with pytest.raises(TypeError, match="w2 must be"):
            quantize_native_fp8_weights(w1, None)


def test_clearing_frees_what_the_engine_quantised_by_itself(weights_on_a_gpu):
    expert = FleetExpert(make_problem())
    expert.call(fp8=True)
    weights_changed(*expert.weights)
    expert.call(fp8=True)
    prepared = known_layer(*expert.weights).state.weights._prepared
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
