"""`ExpertWeights`: one native form whatever the source, lazy accumulators, in-place flush, caches
that are neither stale nor rebuilt.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from experts.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    filled,
    fused_source,
    per_expert_source,
    weight_arrays,
)
from framework import IS_PADDLE, numpy, parameter, tensor, torch

from sonicmoe import experts, weight_changes
from sonicmoe.engine.interface import EngineSettings, GradAccumulators
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.experts import ExpertWeights, FusedParameters, PerExpertParameters, add_to_main_grad
from sonicmoe.interop import data_ptr, grad_enabled
from sonicmoe.quant.recipes import RECIPES

PLAIN = EngineSettings()
FP8 = EngineSettings(recipe=RECIPES["iso128"])
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class CountingEngine(ReferenceEngine):
    def __init__(self):
        self.prepared = 0

    def prepare_weights(self, *arguments):
        self.prepared += 1
        return super().prepare_weights(*arguments)


class InPlaceEngine(ReferenceEngine):
    """Writes changed weights where the old ones lay, as a GPU engine does."""

    def prepare_source(self, source, settings, previous, changed):
        return previous or super().prepare_source(source, settings, previous, changed)


def gradients_of(source, attribute):
    """The attribute of every parameter, stacked like the fused arrangement."""
    arrays = [numpy(getattr(parameter, attribute)) for parameter in source.parameters()]
    if isinstance(source, FusedParameters):
        return arrays
    half = len(arrays) // 2
    return [np.stack(arrays[:half]), np.stack(arrays[half:])]


def bind_main_grads(source, value=0.0):
    for weight in source.parameters():
        weight.main_grad = tensor(np.full(tuple(weight.shape), value), torch.float32)
    return [weight.main_grad for weight in source.parameters()]


def write(weight, array):
    """Change a parameter in place, as an optimizer does."""
    with torch.no_grad():
        weight.copy_(tensor(array, torch.float32).to(weight.dtype))


class TestAccumulators:
    def test_lazy(self):
        weights = ExpertWeights(per_expert_source(*weight_arrays()))
        weights.prepared(ReferenceEngine(), FP8)
        assert weights.allocated_gradient_bytes == 0
        accumulators = weights.accumulators("cpu")
        assert weights.accumulators("cpu") is accumulators
        assert weights.allocated_gradient_bytes == 4 * (3 * 24 * 16 + 3 * 16 * 12)
        assert all(
            held.dtype == torch.float32 and not numpy(held).any() for held in accumulators.tensors()
        )

    def test_release(self):
        weights, _, _ = filled(per_expert_source(*weight_arrays()))
        with pytest.raises(RuntimeError, match="never flushed"):
            weights.release()
        weights.flush()
        weights.release()
        assert weights.allocated_gradient_bytes == 0
        assert not numpy(weights.accumulators("cpu").dw1).any()

    def test_zeros_with_biases(self):
        accumulators = GradAccumulators.zeros(2, 6, 4, 3, True, "cpu")
        assert [tuple(held.shape) for held in accumulators.tensors()] == [
            (2, 6, 4),
            (2, 4, 3),
            (2, 6),
            (2, 4),
        ]
        assert len(GradAccumulators.zeros(2, 6, 4, 3, False, "cpu").tensors()) == 2


class TestFlush:
    @each_source
    @pytest.mark.parametrize("activation", [SWIGLU, ActivationType.SILU], ids=lambda a: a.value)
    def test_adds_into_main_grad_in_place(self, make, activation):
        source = make(*weight_arrays(activation=activation), activation)
        main_grads = bind_main_grads(source, 0.5)
        pointers = [data_ptr(held) for held in main_grads]
        weights, dw1, dw2 = filled(source)
        weights.flush()
        for got, want in zip(gradients_of(source, "main_grad"), (dw1, dw2), strict=True):
            np.testing.assert_array_equal(got, np.float32(want) + np.float32(0.5))
        for weight, held, pointer in zip(source.parameters(), main_grads, pointers, strict=True):
            assert weight.main_grad is held
            assert data_ptr(held) == pointer
            assert weight.grad is None
        assert not weights.unflushed
        assert not any(numpy(held).any() for held in weights.accumulators("cpu").tensors())

    @each_source
    def test_twice_is_once(self, make):
        source = make(*weight_arrays())
        bind_main_grads(source)
        weights, dw1, dw2 = filled(source)
        weights.flush()
        weights.flush()
        for got, want in zip(gradients_of(source, "main_grad"), (dw1, dw2), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_nothing_to_flush_touches_nothing(self):
        source = per_expert_source(*weight_arrays())
        for weight in source.parameters():
            weight.main_grad = None
        ExpertWeights(source).flush()
        assert all(
            weight.main_grad is None and weight.grad is None for weight in source.parameters()
        )

    @each_source
    def test_binds_a_main_grad_that_is_none_and_adds_afterwards(self, make):
        source = make(*weight_arrays())
        for weight in source.parameters():
            weight.main_grad = None
        weights, dw1, dw2 = filled(source)
        weights.flush()
        held = [weight.main_grad for weight in source.parameters()]
        assert all(main_grad.dtype == torch.float32 for main_grad in held)
        again, _, _ = filled(source)
        again.flush()
        for got, want in zip(gradients_of(source, "main_grad"), (dw1, dw2), strict=True):
            np.testing.assert_array_equal(got, 2 * want)
        assert all(
            weight.main_grad is kept for weight, kept in zip(source.parameters(), held, strict=True)
        )

    @pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 4), (4, 1)])
    @each_source
    def test_a_bound_main_grad_shares_no_memory_with_the_accumulators(
        self, make, hidden, intermediate
    ):
        source = make(*weight_arrays(2, hidden, intermediate))
        for weight in source.parameters():
            weight.main_grad = None
        weights, dw1, dw2 = filled(source)
        weights.flush()
        for got, want in zip(gradients_of(source, "main_grad"), (dw1, dw2), strict=True):
            np.testing.assert_array_equal(got, want)

    @each_source
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_without_the_attribute_it_is_grad(self, make, dtype):
        source = make(*weight_arrays(), SWIGLU, getattr(torch, dtype))
        for _ in range(2):
            weights, dw1, dw2 = filled(source)
            weights.flush()
        for got, want in zip(gradients_of(source, "grad"), (dw1, dw2), strict=True):
            np.testing.assert_allclose(got, 2 * want, rtol=2**-7 if dtype == "bfloat16" else 1e-6)
        assert all(weight.grad.dtype == weight.dtype for weight in source.parameters())
        assert not any(
            hasattr(weight, "main_grad") and weight.main_grad is not None
            for weight in source.parameters()
        )

    def test_a_slice_of_a_fused_buffer_is_filled_and_its_neighbours_stay(self):
        source = per_expert_source(*weight_arrays())
        total = sum(int(np.prod(tuple(weight.shape))) for weight in source.parameters())
        gap = 8
        buffer = tensor(np.full(total + gap * (len(source.parameters()) + 1), 9.0), torch.float32)
        used, first = np.zeros(tuple(buffer.shape), bool), gap
        for weight in source.parameters():
            size = int(np.prod(tuple(weight.shape)))
            buffer[first : first + size] = 0.0
            weight.main_grad = buffer[first : first + size].view(list(weight.shape))
            used[first : first + size] = True
            first += size + gap
        weights, dw1, dw2 = filled(source)
        weights.flush()
        np.testing.assert_array_equal(numpy(buffer)[~used], 9.0)
        np.testing.assert_array_equal(
            numpy(buffer)[used], np.concatenate([a.ravel() for a in (*dw1, *dw2)])
        )

    def test_a_rebound_main_grad_is_read_anew(self):
        source = per_expert_source(*weight_arrays())
        old = bind_main_grads(source)
        filled(source)[0].flush()
        before = [numpy(held).copy() for held in old]
        bind_main_grads(source)
        weights, dw1, _ = filled(source)
        weights.flush()
        np.testing.assert_array_equal(gradients_of(source, "main_grad")[0], dw1)
        for held, kept in zip(old, before, strict=True):
            np.testing.assert_array_equal(numpy(held), kept)

    def test_frozen_parameters_get_nothing(self):
        source = per_expert_source(*weight_arrays())
        bind_main_grads(source)
        frozen = source.parameters()[1]
        if IS_PADDLE:
            frozen.stop_gradient = True
        else:
            frozen.requires_grad_(False)
        weights, dw1, _ = filled(source)
        weights.flush()
        assert not numpy(frozen.main_grad).any()
        np.testing.assert_array_equal(numpy(source.parameters()[0].main_grad), dw1[0])

    @pytest.mark.parametrize("wrong", ["dtype", "shape"])
    def test_a_main_grad_that_does_not_fit_is_refused_before_anything_is_added(self, wrong):
        source = per_expert_source(*weight_arrays())
        main_grads = bind_main_grads(source)
        last = source.parameters()[-1]
        bad = np.zeros((12, 16) if wrong == "dtype" else (16, 12))
        last.main_grad = tensor(bad, torch.float32).to(
            torch.bfloat16 if wrong == "dtype" else torch.float32
        )
        weights, dw1, _ = filled(source)
        with pytest.raises(
            DTypeError if wrong == "dtype" else ShapeError,
            match=r"main_grad (is bfloat16|has shape)",
        ):
            weights.flush()
        assert grad_enabled()
        assert weights.unflushed
        assert not any(numpy(held).any() for held in main_grads[:-1])
        last.main_grad = tensor(np.zeros((12, 16)), torch.float32)
        weights.flush()
        np.testing.assert_array_equal(gradients_of(source, "main_grad")[0], dw1)

    def test_add_to_main_grad_tells_whether_there_is_one(self):
        weight = parameter(np.zeros((2, 3), np.float32))
        gradient = tensor(np.ones((2, 3)), torch.float32)
        assert not add_to_main_grad(weight, gradient)
        weight.main_grad = None
        assert add_to_main_grad(weight, gradient)

    @each_source
    def test_through_autograd_gradients_come_back_in_parameter_order(self, make):
        source = make(*weight_arrays())
        first = source.parameters()[0]
        first.main_grad = tensor(np.zeros(tuple(first.shape)), torch.float32)
        weights, dw1, dw2 = filled(source)
        returned = weights.flush_through_autograd()
        expected = [dw1, dw2] if make is fused_source else [*dw1, *dw2]
        assert returned[0] is None
        np.testing.assert_array_equal(numpy(first.main_grad), expected[0])
        for got, want in zip(returned[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(numpy(got), want)
        assert all(weight.grad is None for weight in source.parameters())
        assert weights.flush_through_autograd() == [None] * len(source.parameters())

    def test_experts_that_share_a_parameter_sum_their_gradients(self):
        up_gate, down = weight_arrays()
        modules = expert_modules(up_gate, down)
        modules[2].down_proj = modules[0].down_proj
        source = PerExpertParameters(modules, 3, 16, 12, SWIGLU)
        weights, _, dw2 = filled(source)
        returned = weights.flush_through_autograd()
        shared = sum(numpy(returned[i]) for i in (3, 5) if returned[i] is not None)
        np.testing.assert_allclose(shared, dw2[0] + dw2[2], rtol=1e-6)


class TestCaches:
    @each_source
    @pytest.mark.parametrize("settings", [PLAIN, FP8], ids=["plain", "fp8"])
    def test_prepared_once_while_nothing_changes(self, make, settings):
        engine, weights = CountingEngine(), ExpertWeights(make(*weight_arrays()))
        first = weights.prepared(engine, settings)
        assert all(weights.prepared(engine, settings) is first for _ in range(3))
        assert engine.prepared == 1

    @each_source
    def test_a_changed_value_is_found_whatever_parameter_it_is_in(self, make):
        up_gate, down = weight_arrays()
        source = make(up_gate, down)
        engine, weights = CountingEngine(), ExpertWeights(source)
        weights.prepared(engine, FP8)
        for count, weight in enumerate(source.parameters(), start=2):
            changed = numpy(weight)
            changed.ravel()[3] = np.float32(changed.ravel()[3] * 1.001)
            pointer = data_ptr(weight)
            write(weight, changed)
            assert data_ptr(weight) == pointer, "the test must change the weight in place"
            fresh = weights.prepared(engine, PLAIN)
            assert engine.prepared == count
            w1, w2 = source.native()
            assert np.array_equal(numpy(fresh.w1), numpy(w1))
            assert np.array_equal(numpy(fresh.w2), numpy(w2))
            weights._prepared_for = (engine.name, PLAIN)

    def test_stale_weights_are_never_computed_with(self):
        source = per_expert_source(*weight_arrays())
        engine, weights = CountingEngine(), ExpertWeights(source)
        old = numpy(weights.prepared(engine, PLAIN).w2).copy()
        write(source.parameters()[-1], numpy(source.parameters()[-1]) * 2)
        new = numpy(weights.prepared(engine, PLAIN).w2)
        np.testing.assert_array_equal(new[-1], 2 * old[-1])

    def test_a_new_pointer_is_found(self):
        up_gate, down = weight_arrays()
        modules = expert_modules(up_gate, down)
        engine, weights = (
            CountingEngine(),
            ExpertWeights(PerExpertParameters(modules, 3, 16, 12, SWIGLU)),
        )
        weights.prepared(engine, PLAIN)
        kept = modules[1].down_proj.weight
        modules[1].down_proj.weight = parameter(np.float32(down[1]))
        assert data_ptr(modules[1].down_proj.weight) != data_ptr(kept)
        weights.prepared(engine, PLAIN)
        assert engine.prepared == 2

    def test_other_settings_are_found(self):
        engine, weights = CountingEngine(), ExpertWeights(per_expert_source(*weight_arrays()))
        weights.prepared(engine, PLAIN)
        weights.prepared(engine, FP8)
        weights.prepared(engine, EngineSettings(recipe=FP8.recipe, save_z=ZCode.E4M3))
        assert engine.prepared == 3

    def test_invalidate(self):
        engine, weights = CountingEngine(), ExpertWeights(per_expert_source(*weight_arrays()))
        first = weights.prepared(engine, FP8)
        weights.invalidate()
        assert weights.prepared(engine, FP8) is not first
        assert engine.prepared == 2

    def test_a_forgotten_step_is_warned_about_once(self, caplog):
        source = per_expert_source(*weight_arrays())
        weights, _, _ = filled(source)
        weights.prepared(ReferenceEngine(), PLAIN)
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            for factor in (2, 3):
                write(source.parameters()[0], numpy(source.parameters()[0]) * factor)
                weights.prepared(ReferenceEngine(), PLAIN)
        assert len(caplog.records) == 1
        assert "expert weights changed while gradients wait" in caplog.records[0].getMessage()
        assert "call node.step()" in caplog.records[0].getMessage()

    def test_a_step_that_never_comes_is_warned_about_once(self, caplog):
        """Weights that get no gradient never move, so nothing else shows it."""
        weights = ExpertWeights(per_expert_source(*weight_arrays()))
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            for _ in range(ExpertWeights.FORGOTTEN_STEP_BACKWARDS - 1):
                weights.note_backward()
            assert not caplog.records
            for _ in range(3000):
                weights.note_backward()
        assert len(caplog.records) == 1
        assert "call node.step()" in caplog.records[0].getMessage()

    def test_weights_changed_between_steps_are_no_warning(self, caplog):
        source = per_expert_source(*weight_arrays())
        weights = ExpertWeights(source)
        weights.prepared(ReferenceEngine(), PLAIN)
        write(source.parameters()[0], numpy(source.parameters()[0]) * 2)
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            weights.prepared(ReferenceEngine(), PLAIN)
        assert not caplog.records


class TestBackwardsThatAreLate:
    """A forward is outstanding while the weights change and another forward reads them."""

    def scenario(self, engine, change):
        source = per_expert_source(*weight_arrays())
        weights = ExpertWeights(source)
        prepared = weights.prepared(engine, FP8)
        updates = weights.updates
        change(weights, source.parameters()[1])
        weights.check_current(prepared, updates)  # nothing has overwritten the old weights so far
        weights.prepared(engine, FP8)
        return weights, prepared, updates

    def double(self, weights, weight):
        write(weight, 2 * numpy(weight))

    def double_and_step(self, weights, weight):
        self.double(weights, weight)
        weights.invalidate()

    @pytest.mark.parametrize("change", ["double", "double_and_step"])
    def test_overwritten_weights_are_refused(self, change):
        weights, prepared, updates = self.scenario(InPlaceEngine(), getattr(self, change))
        with pytest.raises(
            RuntimeError, match="read by another forward, between this forward and its backward"
        ):
            weights.check_current(prepared, updates)
        weights.check_current(prepared, weights.updates)

    def test_a_step_without_a_change_is_none(self):
        weights, prepared, updates = self.scenario(
            InPlaceEngine(), lambda weights, weight: weights.invalidate()
        )
        weights.check_current(prepared, updates)

    def test_an_engine_that_kept_the_old_ones_has_them(self):
        weights, prepared, updates = self.scenario(ReferenceEngine(), self.double)
        weights.check_current(prepared, updates)


class TestOnAGpu:
    """Where checksums would wait for the device: version counters, optimizer steps, and what is
    left under Paddle.
    """

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        for module in (experts, weight_changes):
            monkeypatch.setattr(module, "is_cuda", lambda tensor: True)

    def prepared_twice(self, change, engine=None):
        engine, source = engine or CountingEngine(), per_expert_source(*weight_arrays())
        weights = ExpertWeights(source)
        weights.prepared(engine, PLAIN)
        change(source.parameters())
        weights.prepared(engine, PLAIN)
        return engine.prepared

    def test_without_a_change_nothing_is_made_anew(self):
        assert self.prepared_twice(lambda parameters: None) == 1

    @pytest.mark.skipif(IS_PADDLE, reason="Paddle has no version counters that count")
    @pytest.mark.parametrize("fused", [False, True])
    def test_an_optimizer_step_is_seen(self, fused):
        """Fused optimizers move no version counter."""

        def step(parameters):
            for weight in parameters:
                weight.grad = torch.ones_like(weight)
            torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()

        assert self.prepared_twice(step) == 2

    @pytest.mark.skipif(IS_PADDLE, reason="a hook of PyTorch's optimizers")
    def test_a_step_without_the_waiting_gradients_is_warned_about(self, caplog):
        source = per_expert_source(*weight_arrays())
        weights = ExpertWeights(source)
        weights.prepared(ReferenceEngine(), PLAIN)
        weights.note_backward()
        other = torch.nn.Parameter(torch.zeros(1))
        other.grad = torch.ones(1)
        torch.optim.AdamW([other], fused=True).step()
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            weights.prepared(ReferenceEngine(), PLAIN)
        (record,) = caplog.records
        assert "an optimizer stepped while gradients wait in the node" in record.getMessage()

    @pytest.mark.skipif(not IS_PADDLE, reason="elsewhere changes show")
    def test_paddle_trusts_nothing_without_gradients(self):
        engine, weights = CountingEngine(), ExpertWeights(per_expert_source(*weight_arrays()))
        for _ in range(2):
            weights.prepared(engine, PLAIN)
        assert engine.prepared == 1
        with torch.no_grad():
            for _ in range(2):
                weights.prepared(engine, PLAIN)
        assert engine.prepared == 3

    @pytest.mark.skipif(not IS_PADDLE, reason="elsewhere changes show")
    def test_paddle_needs_step_with_complete_gradients_too(self, caplog):
        source = per_expert_source(*weight_arrays())
        bind_main_grads(source)
        weights, _, _ = filled(source)
        weights.prepared(ReferenceEngine(), PLAIN)
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            for _ in range(ExpertWeights.FORGOTTEN_STEP_BACKWARDS + 5):
                weights.note_backward()
                weights._backwards = 0  # flush="backward"
        (record,) = caplog.records
        assert "1024 backward passes have run since node.step()" in record.getMessage()
