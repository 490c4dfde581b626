"""The node on gradients of its output that arrive in FP8: the engine's bits, one question per
backward, diagnosis, and refusals by name.
"""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from engine.fp8_arrivals import FORMS, ISO128, poisoned, problem_with_idle_tokens, quantised, run
from engine.moe_golden import assert_same_bits
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, counts_of

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import captured_calls
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.errors import DTypeError, ShapeError
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import to_bfloat16, tokens_of

if IS_PADDLE:
    from paddle.autograd import PyLayer
    from paddle.distributed.fleet.utils import recompute

# Paddle raises an OSError in place of what a backward raises, with the first lines of its message.
RAISED = OSError if IS_PADDLE else Exception


@pytest.fixture(scope="module")
def problem():
    return problem_with_idle_tokens()


class Source:
    """Has the gradient, and remembers what it was asked with."""

    def __init__(self, gradient):
        self.gradient, self.asked = gradient, []

    def take(self, gradient):
        self.asked.append(gradient)
        return self.gradient


class Call:
    """One forward on bf16 tokens; the gradient that autograd delivers is full of NaN."""

    def __init__(self, layer, source):
        p = layer.problem
        self.x = tensor(p.x, torch.float32, grad=True)
        self.probs = tensor(p.probs, torch.float32, grad=True)
        x = self.x.to(torch.bfloat16)
        self.out = layer.node(x, counts_of(p), tensor(p.indices), self.probs, dout_source=source)

    def backward(self, **options):
        nan = np.full(tuple(self.out.shape), np.nan)
        self.out.backward(tensor(nan, torch.float32).to(torch.bfloat16), **options)
        return self

    @property
    def dx(self):
        return numpy(self.x.grad)

    @property
    def dprobs(self):
        return numpy(self.probs.grad)


def bf16_layer(problem, config=FP8, **options):
    layer = Layer(problem, dtype=torch.bfloat16, config=config, **options)
    layer.set_main_grad(0.0)
    return layer


def result_of(problem, dout, config=FP8, **options):
    layer = bf16_layer(problem, config, **options)
    call = Call(layer, Source(dout)).backward()
    layer.node.step()
    return layer.result(call)


@FORMS
def test_gives_the_bits_of_the_engine(problem, row):
    dout = quantised(problem.dout, row)
    assert_same_bits(result_of(problem, dout), run(problem, ISO128, dout))


def test_a_source_may_return_a_plain_gradient(problem):
    dout = tensor(problem.dout, torch.float32).to(torch.bfloat16)
    assert_same_bits(result_of(problem, dout), run(problem, ISO128))


@FORMS
@pytest.mark.parametrize("config", [FP8, FULL], ids=["fp8", "full"])
def test_rows_without_a_valid_slot_are_never_read(problem, row, config):
    dout = quantised(problem.dout, row)
    results = [result_of(problem, given, config) for given in (dout, poisoned(dout, problem))]
    assert_same_bits(*results)
    assert all(np.isfinite(value).all() for _, value in results[1].items())


def test_it_is_asked_once_by_every_backward_and_by_no_forward(problem):
    layer, source = bf16_layer(problem), Source(quantised(problem.dout))
    call = Call(layer, source)
    with torch.no_grad():
        Call(layer, source)
    assert not source.asked
    call.backward()
    (asked,) = source.asked
    assert tuple(asked.shape) == (37, 256) and np.isnan(numpy(asked)).all()


def test_several_calls_are_outstanding(problem):
    """Each backward asks the source of its own forward."""
    layer = bf16_layer(problem)
    gradients = [quantised(problem.dout * scale) for scale in (1.0, 3.0)]
    calls = [Call(layer, Source(gradient)) for gradient in gradients]
    for call, gradient in reversed(list(zip(calls, gradients, strict=True))):
        call.backward()
        np.testing.assert_array_equal(call.dx, run(problem, ISO128, gradient).dx)


@FORMS
def test_an_engine_that_cannot_read_them_gets_their_values(problem, row, caplog):
    dout = quantised(problem.dout, row)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        got = [result_of(problem, dout, FULL) for _ in range(2)]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "gradients that arrive in FP8 are dequantised to bfloat16" in warning.getMessage()
    assert warning.getMessage().endswith("and FP8 is off")
    for found in got:
        assert_same_bits(found, result_of(problem, to_bfloat16(dout), FULL))


def test_weight_gradients_that_are_put_off(problem):
    dout = quantised(problem.dout)
    assert_same_bits(result_of(problem, dout, split_wgrad=True), result_of(problem, dout))


def test_codes_that_are_written_while_weight_gradients_wait_are_noticed(problem):
    layer, dout = bf16_layer(problem, split_wgrad=True), quantised(problem.dout)
    Call(layer, Source(dout)).backward()
    dout.scale_inv.add_(dout.scale_inv)
    with pytest.raises(RuntimeError, match="written"):
        layer.node.step()


def test_codes_are_freed_when_the_backward_is_over(problem):
    layer, source = bf16_layer(problem), Source(quantised(problem.dout))
    memory = weakref.ref(source.gradient.scale_inv)
    call = Call(layer, source).backward()
    source.gradient = None
    gc.collect()
    assert memory() is None
    del call


def test_no_tokens(problem):
    empty = problem.but(
        **{name: getattr(problem, name)[:0] for name in ("x", "indices", "probs", "dout")}
    )
    codes = tensor(np.zeros((0, 256)), torch.float32).to(torch.float8_e4m3fn)
    call = Call(
        bf16_layer(empty), Source(tokens_of(codes, tensor(np.zeros((0, 2)), torch.float32)))
    ).backward()
    assert call.dx.shape == (0, 256)


class TestAutogradsOwnGradient:
    """Without a source nobody takes codes for numbers."""

    @pytest.mark.skipif(not IS_PADDLE, reason="PyTorch casts gradients before a backward sees them")
    @pytest.mark.parametrize("sourced", [False, True])
    def test_an_e4m3_gradient(self, problem, sourced):
        dout = quantised(problem.dout)

        class Combine(PyLayer):
            @staticmethod
            def forward(ctx, out):
                return out.clone()

            @staticmethod
            def backward(ctx, gradient):
                return dout.codes

        layer, source = bf16_layer(problem), Source(dout) if sourced else None
        call = Call(layer, source)
        call.out = Combine.apply(call.out)
        if not sourced:
            with pytest.raises(RAISED, match="dout is float8_e4m3fn without its scales"):
                call.backward()
            return
        call.backward()
        (asked,) = source.asked
        assert asked.dtype == torch.float8_e4m3fn
        np.testing.assert_array_equal(call.dx, run(problem, ISO128, dout).dx)

    @pytest.mark.skipif(not IS_PADDLE, reason="PyTorch casts gradients before a backward sees them")
    def test_other_dtypes_are_cast_to_the_outputs(self, problem):
        """As Paddle does by itself for PyLayers that do not refuse."""

        class Widening(PyLayer):
            @staticmethod
            def forward(ctx, out):
                return out.clone()

            @staticmethod
            def backward(ctx, gradient):
                return tensor(problem.dout, torch.float32)

        results, source = [], Source(quantised(problem.dout))
        for given in (None, source):
            call = Call(bf16_layer(problem), given)
            Widening.apply(call.out).backward(
                tensor(problem.dout, torch.float32).to(torch.bfloat16)
            )
            results.append(call.dx)
        assert source.asked[0].dtype == torch.bfloat16
        np.testing.assert_array_equal(results[0], run(problem, ISO128).dx)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_recompute(problem, reentrant):
    dout = quantised(problem.dout)
    layer, source = bf16_layer(problem), Source(dout)
    x, probs = (tensor(v, torch.float32, grad=True) for v in (problem.x, problem.probs))

    def call(x, probs):
        given = counts_of(problem), tensor(problem.indices), probs
        return layer.node(x.to(torch.bfloat16), *given, dout_source=source)

    if IS_PADDLE:
        out = recompute(call, x, probs, use_reentrant=reentrant)
    else:
        from torch.utils.checkpoint import checkpoint

        out = checkpoint(call, x, probs, use_reentrant=reentrant)
    out.backward(tensor(np.zeros((37, 256)), torch.float32).to(torch.bfloat16))
    assert len(source.asked) == 1
    np.testing.assert_array_equal(numpy(x.grad), run(problem, ISO128, dout).dx)


@pytest.mark.skipif(not IS_PADDLE, reason="PyTorch's checkpoint hands arguments through untouched")
def test_paddles_recompute_takes_it_by_position(problem):
    """Re-entrant recompute of the node itself refuses keyword-only arguments."""
    layer, dout = bf16_layer(problem), quantised(problem.dout)
    x = tensor(problem.x, torch.float32, grad=True)
    probs = tensor(problem.probs, torch.float32)
    given = counts_of(problem), tensor(problem.indices), probs, None, None, Source(dout)
    recompute(layer.node, x.to(torch.bfloat16), *given).backward()
    np.testing.assert_array_equal(numpy(x.grad), run(problem, ISO128, dout).dx)


class TestDiagnostics:
    @pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])
    @FORMS
    def test_a_dumped_step_is_healthy_and_holds_the_codes(self, problem, row, fp8_wgrad, tmp_path):
        config = SonicMoEConfig(engine="reference", fp8_mode="perf", fp8_wgrad=fp8_wgrad)
        dout, layer = quantised(problem.dout, row), bf16_layer(problem, config)
        layer.node.dump(tmp_path / "step.npz")
        Call(layer, Source(poisoned(dout, problem))).backward()
        step = load_dump(tmp_path / "step.npz")
        served = ((problem.indices >= 0) & (problem.indices < problem.num_experts)).any(1)
        held = numpy(dout.bytes.to(torch.int32))
        np.testing.assert_array_equal(step.dout[served], numpy(dequantize(dout))[served])
        np.testing.assert_array_equal(step.dout_scale[served], numpy(dout.scale_inv)[served])
        np.testing.assert_array_equal(step.dout_codes[served], held[served])
        assert not step.dout[~served].any() and step.x_codes is None
        assert step.has_row_scales("dout") == row and not step.has_row_scales("x")
        report = bisect(step, "reference")
        assert report.healthy, report.fault
        assert ("wgrad_dout" in report.missing) == (row and fp8_wgrad)

    def test_a_dump_for_an_engine_that_got_values_holds_values(self, problem, tmp_path):
        layer, dout = bf16_layer(problem, FULL), quantised(problem.dout)
        layer.node.dump(tmp_path / "step.npz")
        Call(layer, Source(dout)).backward()
        step = load_dump(tmp_path / "step.npz")
        assert step.dout_codes is None
        np.testing.assert_array_equal(step.dout, numpy(to_bfloat16(dout)))
        assert bisect(step, "reference").healthy

    def test_a_dump_with_half_of_a_gradient_is_refused(self, problem, tmp_path):
        layer = bf16_layer(problem)
        layer.node.dump(tmp_path / "step.npz")
        Call(layer, Source(quantised(problem.dout))).backward()
        step = load_dump(tmp_path / "step.npz")
        with pytest.raises(ShapeError, match="dout_codes has shape None and dout_scale"):
            step.but(dout_codes=None)
        with pytest.raises(ShapeError, match="and codes of its shape None"):
            step.but(dout=None)

    def test_a_captured_call_holds_the_values(self, problem):
        dout = quantised(problem.dout)
        with captured_calls("call") as cases:
            Call(bf16_layer(problem), Source(dout)).backward()
        np.testing.assert_array_equal(cases[0].dout[1], numpy(to_bfloat16(dout))[1])

    def test_a_nan_that_came_with_the_gradient_is_found(self, problem):
        dout = quantised(problem.dout)
        scale = numpy(dout.scale_inv)
        scale[1, 0] = np.nan
        source = Source(tokens_of(dout.codes, tensor(scale, torch.float32)))
        with pytest.raises(NonFiniteError, match="input dout at token 1"), detect_nonfinite():
            Call(bf16_layer(problem), source).backward()

    def test_the_placeholder_is_no_finding(self, problem):
        with detect_nonfinite():
            Call(bf16_layer(problem), Source(quantised(problem.dout))).backward()


class TestRefusals:
    def test_what_is_no_source(self, problem):
        for given in (quantised(problem.dout), {"data": None}):
            with pytest.raises(DTypeError, match=r"dout_source is .*; needed: an object with take"):
                Call(bf16_layer(problem), given)

    @pytest.mark.parametrize(
        ("gradient", "words"),
        [
            (None, "take returned NoneType; needed: a BlockScaledTensor or a tensor"),
            (("codes", "scales"), "take returned tuple"),
        ],
    )
    def test_what_is_no_gradient(self, problem, gradient, words):
        with pytest.raises(RAISED, match=words):
            Call(bf16_layer(problem), Source(gradient)).backward()

    def test_codes_alone(self, problem):
        with pytest.raises(RAISED, match="dout is float8_e4m3fn without its scales"):
            Call(bf16_layer(problem), Source(quantised(problem.dout).codes)).backward()

    def test_a_gradient_of_another_call(self, problem):
        with pytest.raises(RAISED, match=r"dout has shape \(36, 256\); needed: \(37, 256\)"):
            Call(bf16_layer(problem), Source(quantised(problem.dout[:36]))).backward()

    def test_after_a_refusal_nothing_was_added(self, problem):
        layer = bf16_layer(problem)
        with pytest.raises(RAISED):
            Call(layer, Source(None)).backward()
        assert not any(gradient.any() for gradient in layer.gradients("main_grad"))
