"""The flush by one launch keeps every promise of the flush by plain operations; what no launch may
serve together takes those.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from gradients import test_sink as plain
from gradients.flush_by_address import FlushByAddress
from weights.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    filled,
    per_expert_source,
    weight_arrays,
)

from sonicmoe.gradients import flush
from sonicmoe.weights.parameters import PerExpertParameters

each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    launch = FlushByAddress()
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: launch)
    return launch


class TestPromises(plain.TestFlush):
    """Every test of the plain flush."""


@each_source
def test_one_launch_serves_all(make, kernel):
    source = make(*weight_arrays())
    plain.bind_main_grads(source)
    weights, _, _ = filled(source)
    weights.flush()
    weights.flush()
    assert kernel.launches == 1


@each_source
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("times", [1, 2])
def test_the_same_bits_as_plain_operations(make, dtype, times, monkeypatch):
    def grads():
        source = make(*weight_arrays(), SWIGLU, getattr(torch, dtype))
        for seed in range(times):
            filled(source, seed)[0].flush()
        return [numpy(weight.grad) for weight in source.parameters()]

    ours = grads()
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: None)
    for got, want in zip(ours, grads(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_some_of_every_kind(kernel):
    """main_grad to add to, main_grad to bind, .grad, frozen: one launch."""
    source = per_expert_source(*weight_arrays())
    added, bound, plain_grad, frozen, *rest = source.parameters()
    added.main_grad = tensor(np.full(tuple(added.shape), 2.0), torch.float32)
    bound.main_grad = None
    plain.freeze(frozen)
    weights, dw1, dw2 = filled(source)
    weights.flush()
    assert kernel.launches == 1
    np.testing.assert_array_equal(numpy(added.main_grad), np.float32(dw1[0]) + np.float32(2))
    np.testing.assert_array_equal(numpy(bound.main_grad), dw1[1])
    np.testing.assert_array_equal(numpy(plain_grad.grad), dw1[2])
    assert frozen.grad is None
    for weight, want in zip(rest, dw2[1:], strict=True):
        np.testing.assert_array_equal(numpy(weight.grad), want)


@pytest.mark.skipif(not IS_PADDLE, reason="frees weights as Paddle's sharding does")
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "yet to bind"])
@each_source
def test_freed_weights_get_their_gradients(make, bound, kernel):
    source = make(*weight_arrays())
    plain.bind_main_grads(source, 0.0 if bound else None)
    weights, _, _ = filled(source)
    for weight in source.parameters():
        weight._clear_data()
    weights.flush()
    assert kernel.launches == 1
    for weight in source.parameters():
        assert tuple(weight.main_grad.shape) == tuple(weight.shape)
        assert numpy(weight.main_grad).any()


def test_overlapping_destinations_are_added_one_after_the_other(kernel):
    source = per_expert_source(*weight_arrays())
    shared = tensor(np.zeros((16, 24)), torch.float32)
    for weight in source.parameters()[:3]:
        weight.main_grad = shared
    weights, dw1, _ = filled(source)
    weights.flush()
    assert kernel.launches == 0
    np.testing.assert_allclose(numpy(shared), dw1.sum(0), rtol=1e-6, atol=1e-6)


def test_strided_destinations_take_plain_operations(kernel):
    source = per_expert_source(*weight_arrays())
    wide = tensor(np.zeros((16, 48)), torch.float32)
    first = source.parameters()[0]
    first.main_grad = wide[:, ::2]
    assert not first.main_grad.is_contiguous()
    weights, dw1, _ = filled(source)
    weights.flush()
    assert kernel.launches == 0
    np.testing.assert_array_equal(numpy(first.main_grad), dw1[0])


def test_shared_parameters_take_plain_operations(kernel):
    up_gate, down = weight_arrays()
    modules = expert_modules(up_gate, down)
    modules[2].down_proj = modules[0].down_proj
    source = PerExpertParameters(modules, 3, 16, 12, SWIGLU)
    plain.bind_main_grads(source, None)
    weights, _, dw2 = filled(source)
    weights.flush()
    assert kernel.launches == 0
    shared = numpy(source.parameters()[3].main_grad)
    np.testing.assert_allclose(shared, dw2[0] + dw2[2], rtol=1e-6, atol=1e-6)


@each_source
def test_a_launch_that_fails_binds_nothing_and_loses_nothing(make, monkeypatch):
    class Refuses(FlushByAddress):
        def flush_gradients(self, *arguments):
            raise RuntimeError("no launch")

    source = make(*weight_arrays())
    plain.bind_main_grads(source, None)
    weights, dw1, _ = filled(source)
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: Refuses())
    with pytest.raises(RuntimeError, match="no launch"):
        weights.flush()
    assert weights.waiting
    assert all(weight.main_grad is None for weight in source.parameters())
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: FlushByAddress())
    weights.flush()
    np.testing.assert_array_equal(plain.gradients_of(source, "main_grad")[0], dw1)


def test_a_host_accumulator_has_no_kernel(monkeypatch):
    monkeypatch.undo()
    assert flush.kernel_for(parameter(np.zeros((1, 1), np.float32))) is None
