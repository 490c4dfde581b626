"""`GradientSink`: a lazy native buffer, and a flush that adds in place, once, and in the user's layout: by
plain operations, or by one launch with the same bits.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from engine.moe_golden import native_order
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from pairwise import pairwise
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
from sonicmoe.enums import ActivationType
from sonicmoe.errors import DTypeError
from sonicmoe.gradients import flush
from sonicmoe.gradients.flush import flush_native
from sonicmoe.gradients.sink import GradientSink
from sonicmoe.interop import grad_enabled
from sonicmoe.weights.parameters import PerExpertParameters

each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class Failing(ReferenceEngine):
    def backward_dw(self, pending, targets):
        targets.adding = True
        targets.dw2.fill_(1.0)
        raise MemoryError("no room for dw1")


def bind_main_grads(source, value=0.0):
    """Full of a value, or None."""
    for weight in source.parameters():
        made = None if value is None else np.full(tuple(weight.shape), value)
        weight.main_grad = None if made is None else tensor(made, torch.float32)
    return [weight.main_grad for weight in source.parameters()]


def freeze(weight):
    if IS_PADDLE:
        weight.stop_gradient = True
    else:
        weight.requires_grad_(False)


def test_memory_of_one_backward_where_nothing_waits():
    """The sink keeps nothing of it, whatever the engine did to it."""
    sink = GradientSink(per_expert_source(*weight_arrays()))
    batches = [opened(sink) for _ in range(2)]
    assert batches[0].targets is not batches[1].targets and sink.nbytes == 0
    with pytest.raises(MemoryError):
        sink.add(Failing(), None, batches[0])
    sink.flush()
    assert not any(numpy(gradient).any() for gradient in sink.close(batches[1]))


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


@pytest.mark.parametrize(
    ("make", "activation", "place", "times"),
    pairwise(SOURCES, (SWIGLU, ActivationType.SILU), ("main_grad", *NUMBERS), (1, 2)),
)
def test_one_launch_has_the_same_bits(make, activation, place, times, monkeypatch):
    """place: a `main_grad` that holds something, or the dtype of weights whose `.grad` is made. tests/oracle
    has what plain operations give.
    """

    def grads(kernel):
        monkeypatch.setattr(flush, "kernel_for", lambda accumulator: kernel)
        arrays, is_held = weight_arrays(activation=activation), place == "main_grad"
        source = SOURCES[make](*arrays, activation, None if is_held else getattr(torch, place))
        if is_held:
            bind_main_grads(source, 0.5)
        for seed in range(times):
            filled(source, seed)[0].flush()
        attribute = "main_grad" if is_held else "grad"
        return [numpy(getattr(weight, attribute)) for weight in source.parameters()]

    for got, want in zip(grads(FlushByAddress()), grads(None), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_main_grad_that_does_not_fit_is_refused_before_anything_is_added(kernel):
    source = per_expert_source(*weight_arrays())
    main_grads, last = bind_main_grads(source), source.parameters()[-1]
    last.main_grad = None
    sink, dw1, _ = filled(source)
    last.main_grad = main_grads[-1].to(torch.bfloat16)
    with pytest.raises(DTypeError, match="main_grad is bfloat16"):
        sink.flush()
    assert grad_enabled() and sink.waiting
    assert not any(numpy(held).any() for held in main_grads)
    last.main_grad = main_grads[-1]
    sink.flush()
    np.testing.assert_array_equal(np.stack(list(map(numpy, main_grads[:3]))), dw1)


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
    parameters, native = source.parameters(), GradientTargets.native(*sink.held().values())
    trained = [True] * len(parameters)
    returned = flush_native(source, parameters, trained, native, through_autograd=True)
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
    first = numpy(source.parameters()[0].main_grad)
    np.testing.assert_array_equal(first, dw1[0] if first.ndim == 2 else dw1)


def test_a_host_accumulator_has_no_kernel():
    assert flush.kernel_for(parameter(np.zeros((1, 1), np.float32))) is None
