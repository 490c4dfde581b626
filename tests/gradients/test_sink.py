"""`GradientSink`: a lazy native buffer, and a flush that adds in place, once, and in the user's
layout.
"""

from __future__ import annotations

from operator import is_

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch
from weights.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    filled,
    opened,
    per_expert_source,
    weight_arrays,
)

from sonicmoe.engine.capabilities import RECORDS
from sonicmoe.engine.interface import GradientTargets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import GradientMode
from sonicmoe.enums import ActivationType, FlushMode
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.gradients.flush import flush_native
from sonicmoe.gradients.sink import GradientSink
from sonicmoe.interop import data_ptr, grad_enabled, requires_grad
from sonicmoe.weights.parameters import PerExpertParameters
from sonicmoe.weights.stacked import FusedParameters

each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class Failing(ReferenceEngine):
    def backward_dw(self, pending, targets):
        targets.adding = True
        targets.dw2.fill_(1.0)
        raise MemoryError("no room for dw1")


def gradients_of(source, attribute):
    """The attribute of every parameter, stacked like the fused arrangement."""
    arrays = [numpy(getattr(parameter, attribute)) for parameter in source.parameters()]
    if isinstance(source, FusedParameters):
        return arrays
    half = len(arrays) // 2
    return [np.stack(arrays[:half]), np.stack(arrays[half:])]


def bind_main_grads(source, value=0.0):
    """Full of a value, or None."""
    for weight in source.parameters():
        made = None if value is None else np.full(tuple(weight.shape), value)
        weight.main_grad = None if made is None else tensor(made, torch.float32)
    return [weight.main_grad for weight in source.parameters()]


def assert_gradients(source, dw1, dw2, attribute="main_grad", **options):
    for got, want in zip(gradients_of(source, attribute), (dw1, dw2), strict=True):
        np.testing.assert_allclose(got, want, **{"rtol": 0} | options)


def freeze(weight):
    if IS_PADDLE:
        weight.stop_gradient = True
    else:
        weight.requires_grad_(False)


def sink_of(source):
    return GradientSink(source, FlushMode.STEP)


def flushed(source, native):
    """What autograd gets of a native buffer."""
    weights = source.parameters()
    trained = list(map(requires_grad, weights))
    return flush_native(source, weights, trained, native, through_autograd=True)


class TestNativeBuffer:
    def test_lazy(self):
        sink = sink_of(per_expert_source(*weight_arrays()))
        assert sink.nbytes == 0 and sink.held() == {}
        targets = opened(sink).targets
        assert opened(sink).targets is targets
        assert sink.nbytes == targets.nbytes == 4 * (3 * 24 * 16 + 3 * 16 * 12)
        assert set(sink.held()) == {"dw1", "dw2"}
        assert all(
            held.dtype == torch.float32 and not numpy(held).any() for held in targets.tensors()
        )

    def test_of_one_backward_where_nothing_waits(self):
        """Nothing is kept of it, whatever the engine did to it."""
        sink = GradientSink(per_expert_source(*weight_arrays()))
        batches = [opened(sink) for _ in range(2)]
        assert batches[0].targets is not batches[1].targets and sink.nbytes == 0
        with pytest.raises(MemoryError):
            sink.add(Failing(), None, batches[0])
        sink.flush()
        assert not any(numpy(gradient).any() for gradient in sink.close(batches[1]))

    def test_every_engine_adds_into_one(self):
        """The sink gives every engine such a buffer and asks none whether it can."""
        without = [
            name for name, record in RECORDS.items() if GradientMode.NATIVE not in record.gradients
        ]
        assert not without

    def test_an_addition_that_fails_leaves_the_sink_incomplete(self):
        """Nothing is flushed, however often it is tried, until what waits is discarded."""
        source = per_expert_source(*weight_arrays())
        main_grads = bind_main_grads(source)
        sink, _, _ = filled(source)
        with pytest.raises(MemoryError):
            sink.add(Failing(), None, opened(sink))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="left a part of them in the node"):
                sink.flush()
        with pytest.raises(RuntimeError, match="never flushed"):
            sink.release()
        sink.discard()
        sink.flush()
        assert not any(numpy(held).any() for held in (*main_grads, *sink.held().values()))
        sink.release()

    def test_release(self):
        sink, _, _ = filled(per_expert_source(*weight_arrays()))
        with pytest.raises(RuntimeError, match="never flushed"):
            sink.release()
        sink.flush()
        sink.release()
        assert sink.nbytes == 0
        assert not numpy(opened(sink).targets.dw1).any()

    def test_zeros_with_biases(self):
        accumulators = GradientTargets.zeros(2, 6, 4, 3, True, "cpu")
        shapes = [tuple(held.shape) for held in accumulators.tensors()]
        assert shapes == [(2, 6, 4), (2, 4, 3), (2, 6), (2, 4)]
        assert len(GradientTargets.zeros(2, 6, 4, 3, False, "cpu").tensors()) == 2


class TestFlush:
    @each_source
    @pytest.mark.parametrize("activation", [SWIGLU, ActivationType.SILU], ids=lambda a: a.value)
    def test_adds_into_main_grad_in_place_and_once(self, make, activation):
        source = make(*weight_arrays(activation=activation), activation)
        main_grads = bind_main_grads(source, 0.5)
        pointers = [data_ptr(held) for held in main_grads]
        sink, dw1, dw2 = filled(source)
        for _ in range(2):
            sink.flush()
            assert_gradients(source, *(np.float32(dw) + np.float32(0.5) for dw in (dw1, dw2)))
        for weight, held, pointer in zip(source.parameters(), main_grads, pointers, strict=True):
            assert weight.main_grad is held
            assert data_ptr(held) == pointer
            assert weight.grad is None
        assert not sink.waiting
        assert not any(numpy(held).any() for held in sink.held().values())

    def test_nothing_to_flush_touches_nothing(self):
        source = per_expert_source(*weight_arrays())
        bind_main_grads(source, None)
        sink_of(source).flush()
        assert all(weight.main_grad is weight.grad is None for weight in source.parameters())

    @each_source
    def test_binds_a_main_grad_that_is_none_and_adds_afterwards(self, make):
        source = make(*weight_arrays())
        bind_main_grads(source, None)
        sink, dw1, dw2 = filled(source)
        sink.flush()
        held = [weight.main_grad for weight in source.parameters()]
        assert all(main_grad.dtype == torch.float32 for main_grad in held)
        again, _, _ = filled(source)
        again.flush()
        assert_gradients(source, 2 * dw1, 2 * dw2)
        now = [weight.main_grad for weight in source.parameters()]
        assert all(map(is_, now, held))

    @pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 4), (4, 1)])
    @each_source
    def test_a_bound_main_grad_shares_no_memory_with_the_accumulators(
        self, make, hidden, intermediate
    ):
        source = make(*weight_arrays(2, hidden, intermediate))
        bind_main_grads(source, None)
        sink, *gradients = filled(source)
        sink.flush()
        assert_gradients(source, *gradients)

    @each_source
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_without_the_attribute_it_is_grad(self, make, dtype):
        source = make(*weight_arrays(), SWIGLU, getattr(torch, dtype))
        for _ in range(2):
            sink, dw1, dw2 = filled(source)
            sink.flush()
        rtol = 2**-7 if dtype == "bfloat16" else 1e-6
        assert_gradients(source, 2 * dw1, 2 * dw2, "grad", rtol=rtol)
        weights = source.parameters()
        assert all(weight.grad.dtype == weight.dtype for weight in weights)
        assert not any(getattr(weight, "main_grad", None) is not None for weight in weights)

    def test_frozen_parameters_get_nothing(self):
        source = per_expert_source(*weight_arrays())
        bind_main_grads(source)
        frozen = source.parameters()[1]
        freeze(frozen)
        sink, dw1, _ = filled(source)
        sink.flush()
        assert not numpy(frozen.main_grad).any()
        np.testing.assert_array_equal(numpy(source.parameters()[0].main_grad), dw1[0])

    @pytest.mark.parametrize("wrong", ["dtype", "shape"])
    def test_a_main_grad_that_does_not_fit_is_refused_before_anything_is_added(self, wrong):
        source = per_expert_source(*weight_arrays())
        main_grads = bind_main_grads(source)
        last = source.parameters()[-1]
        bad = np.zeros((12, 16) if wrong == "dtype" else (16, 12))
        dtype, error = torch.float32, ShapeError
        if wrong == "dtype":
            dtype, error = torch.bfloat16, DTypeError
        last.main_grad = tensor(bad, torch.float32).to(dtype)
        words = r"main_grad (is bfloat16|has shape)"
        with pytest.raises(error, match=words):  # where the first of them begins to wait
            filled(source)
        misfit, last.main_grad = last.main_grad, None
        sink, dw1, _ = filled(source)
        last.main_grad = misfit
        with pytest.raises(error, match=words):
            sink.flush()
        assert grad_enabled()
        assert sink.waiting
        assert not any(numpy(held).any() for held in main_grads[:-1])
        last.main_grad = tensor(np.zeros((12, 16)), torch.float32)
        sink.flush()
        np.testing.assert_array_equal(gradients_of(source, "main_grad")[0], dw1)

    @each_source
    def test_through_autograd_gradients_come_back_in_parameter_order(self, make):
        source = make(*weight_arrays())
        first = source.parameters()[0]
        first.main_grad = tensor(np.zeros(tuple(first.shape)), torch.float32)
        sink, dw1, dw2 = filled(source)
        returned = flushed(source, GradientTargets.native(*sink.held().values()))
        expected = [*dw1, *dw2] if make is per_expert_source else [dw1, dw2]
        assert returned[0] is None
        np.testing.assert_array_equal(numpy(first.main_grad), expected[0])
        for got, want in zip(returned[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(numpy(got), want)
        assert all(weight.grad is None for weight in source.parameters())

    def test_experts_that_share_a_parameter_sum_their_gradients(self):
        up_gate, down = weight_arrays()
        modules = expert_modules(up_gate, down)
        modules[2].down_proj = modules[0].down_proj
        source = PerExpertParameters(modules, 3, 16, 12, SWIGLU)
        sink, _, dw2 = filled(source)
        returned = flushed(source, GradientTargets.native(*sink.held().values()))
        shared = sum(numpy(returned[i]) for i in (3, 5) if returned[i] is not None)
        np.testing.assert_allclose(shared, dw2[0] + dw2[2], rtol=1e-6)
