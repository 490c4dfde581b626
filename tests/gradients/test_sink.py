"""`GradientSink`: a lazy native buffer, and a flush that adds in place, once, and in the user's layout: by
plain operations, or by one launch with the same bits.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from engine.moe_golden import native_order
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from weights.weight_sources import (
    SOURCES,
    SWIGLU,
    expert_modules,
    filled,
    opened,
    per_expert_source,
    weight_arrays,
)

from sonicmoe.engine.interface import GradientTargets
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, FlushMode
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.gradients import flush
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

    def test_release(self):
        sink, _, _ = filled(per_expert_source(*weight_arrays()))
        with pytest.raises(RuntimeError, match="never flushed"):
            sink.release()
        sink.flush()
        sink.release()
        assert sink.nbytes == 0
        assert not numpy(opened(sink).targets.dw1).any()


NUMBERS = {"float32": 21, "bfloat16": 22, "float16": 23}
FRESH = 64
WORDS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def memory_at(address, shape, word):
    """An array that is that memory."""
    size = int(np.prod(shape)) * np.dtype(word).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), word).reshape(shape)


def to_bfloat16(values):
    """The bits of finite fp32 values rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class FlushByAddress:
    """What `flush_gradients` of kernels/cuda/flush.cu does, on host memory: it sees addresses and formats,
    no tensors and no layouts. The numbers of formats are its own: the caller may know none but those
    that it is told. It counts its launches.
    """

    def __init__(self):
        self.launches = 0

    def gradient_format(self, dtype, fresh):
        return NUMBERS[dtype] + FRESH * fresh

    def flush_gradients(self, dw1, dw2, table, transposed, split_half, stream):
        self.launches += 1
        experts = int(dw1.shape[0])
        assert len(table) == 4 * experts
        pairs = np.asarray(table, np.int64).reshape(2, experts, 2)
        for entries, accumulator, halves in ((pairs[0], dw1, split_half), (pairs[1], dw2, False)):
            gradients = numpy(accumulator).astype(np.float32)
            order = native_order(gradients.shape[1], halves)
            for (address, code), native in zip(entries.tolist(), gradients, strict=True):
                matrix = np.empty_like(native)
                matrix[order] = native
                self.write(address, code, matrix.T if transposed else matrix)
            accumulator.zero_()

    @staticmethod
    def write(address, code, gradient):
        if address == 0:
            return
        (dtype,) = (name for name, number in NUMBERS.items() if number == code % FRESH)
        target = memory_at(address, gradient.shape, WORDS[dtype])
        held = from_bfloat16(target) if dtype == "bfloat16" else target.astype(np.float32)
        total = gradient if code >= FRESH else held + gradient
        target[:] = to_bfloat16(total) if dtype == "bfloat16" else total.astype(target.dtype)


@pytest.fixture(params=["plain operations", "one launch"])
def kernel(request, monkeypatch):
    launch = FlushByAddress() if request.param == "one launch" else None
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: launch)
    return launch


def require_launches(kernel, count):
    assert kernel is None or kernel.launches == count


@pytest.mark.usefixtures("kernel")
class TestFlush:
    """By plain operations, and by one launch; tests/oracle has what parameters of every kind get."""

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


@each_source
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("times", [1, 2])
def test_one_launch_has_the_same_bits(make, dtype, times, monkeypatch):
    def grads(kernel):
        monkeypatch.setattr(flush, "kernel_for", lambda accumulator: kernel)
        source = make(*weight_arrays(), SWIGLU, getattr(torch, dtype))
        for seed in range(times):
            filled(source, seed)[0].flush()
        return [numpy(weight.grad) for weight in source.parameters()]

    for got, want in zip(grads(FlushByAddress()), grads(None), strict=True):
        np.testing.assert_array_equal(got, want)


def test_some_of_every_kind(kernel):
    """main_grad to add to, main_grad to bind, .grad, frozen."""
    source = per_expert_source(*weight_arrays(), SWIGLU, torch.bfloat16)
    added, bound, plain_grad, frozen, *rest = source.parameters()
    added.main_grad = tensor(np.full(tuple(added.shape), 2.0), torch.float32)
    bound.main_grad = None
    freeze(frozen)
    weights, dw1, dw2 = filled(source)
    weights.flush()
    require_launches(kernel, 1)
    np.testing.assert_array_equal(numpy(added.main_grad), np.float32(dw1[0]) + np.float32(2))
    assert bound.main_grad.dtype == torch.float32
    np.testing.assert_array_equal(numpy(bound.main_grad), dw1[1])
    assert frozen.grad is None
    for weight, want in zip((plain_grad, *rest), (dw1[2], *dw2[1:]), strict=True):
        rounded = tensor(want, torch.float32).to(torch.bfloat16)
        np.testing.assert_array_equal(numpy(weight.grad), numpy(rounded))


@pytest.mark.skipif(not IS_PADDLE, reason="frees weights as Paddle's sharding does")
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "yet to bind"])
@each_source
def test_freed_weights_get_their_gradients(make, bound, kernel):
    source = make(*weight_arrays())
    bind_main_grads(source, 0.0 if bound else None)
    weights, _, _ = filled(source)
    for weight in source.parameters():
        weight._clear_data()
    weights.flush()
    require_launches(kernel, 1)
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
    require_launches(kernel, 0)
    np.testing.assert_allclose(numpy(shared), dw1.sum(0), rtol=1e-6, atol=1e-6)


def test_strided_destinations_take_plain_operations(kernel):
    source = per_expert_source(*weight_arrays())
    wide = tensor(np.zeros((16, 48)), torch.float32)
    first = source.parameters()[0]
    first.main_grad = wide[:, ::2]
    assert not first.main_grad.is_contiguous()
    weights, dw1, _ = filled(source)
    weights.flush()
    require_launches(kernel, 0)
    np.testing.assert_array_equal(numpy(first.main_grad), dw1[0])


def test_experts_that_share_a_parameter_sum_their_gradients(kernel):
    """By plain operations, and where autograd gets them, whose sum is rounded once."""
    up_gate, down = weight_arrays()
    modules = expert_modules(up_gate, down, torch.bfloat16)
    modules[2].down_proj = modules[0].down_proj
    source = PerExpertParameters(modules, 3, 16, 12, SWIGLU)
    bind_main_grads(source, None)
    weights, _, dw2 = filled(source)
    weights.flush()
    require_launches(kernel, 0)
    total = dw2[0] + dw2[2]
    found = numpy(source.parameters()[3].main_grad)
    np.testing.assert_allclose(found, total, rtol=1e-6, atol=1e-6)
    for weight in {id(weight): weight for weight in source.parameters()}.values():
        del weight.main_grad
    sink, _, _ = filled(source)
    returned = flushed(source, GradientTargets.native(*sink.held().values()))
    rounded = tensor(total, torch.float32).to(torch.bfloat16)
    assert returned[3].dtype == torch.bfloat16 and returned[5] is None
    np.testing.assert_array_equal(numpy(returned[3]), numpy(rounded))


@each_source
def test_a_launch_that_fails_binds_nothing_and_loses_nothing(make, monkeypatch):
    class Refuses(FlushByAddress):
        def flush_gradients(self, *arguments):
            raise RuntimeError("no launch")

    source = make(*weight_arrays())
    bind_main_grads(source, None)
    weights, dw1, _ = filled(source)
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: Refuses())
    with pytest.raises(RuntimeError, match="no launch"):
        weights.flush()
    assert weights.waiting
    assert all(weight.main_grad is None for weight in source.parameters())
    monkeypatch.setattr(flush, "kernel_for", lambda accumulator: FlushByAddress())
    weights.flush()
    np.testing.assert_array_equal(gradients_of(source, "main_grad")[0], dw1)


def test_a_host_accumulator_has_no_kernel():
    assert flush.kernel_for(parameter(np.zeros((1, 1), np.float32))) is None
