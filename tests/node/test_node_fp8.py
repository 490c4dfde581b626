"""The node on tokens, and on gradients of its output, that arrive in FP8: the engine's bits, the
gradient where it belongs, diagnosis, and refusals by name.
"""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from engine.fp8_arrivals import ISO128, poisoned, problem_with_idle_tokens, quantised, run
from engine.moe_golden import assert_same_bits
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, assert_equal, counts_of, recomputed

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.nonfinite import detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import to_bfloat16

if IS_PADDLE:
    import paddle
    from paddle.autograd import PyLayer

PROBLEM = problem_with_idle_tokens()


@pytest.fixture
def problem():
    return PROBLEM


def bf16_layer(problem, config=FP8, **options):
    return Layer(problem, dtype=torch.bfloat16, config=config, main_grad=0.0, **options)


def bf16(array, **options):
    return tensor(array, torch.float32, **options).to(torch.bfloat16)


class Source:
    """Has the gradient, and remembers what it was asked with."""

    def __init__(self, gradient):
        self.gradient, self.asked = gradient, []

    def take(self, gradient):
        self.asked.append(gradient)
        return self.gradient


class TokensCall:
    """One forward on quantised tokens, with the gradient going to an expanded element."""

    def __init__(self, layer, x, *, dx_to="expanded"):
        p, self.dout = layer.problem, bf16(layer.problem.dout)
        self.probs = tensor(p.probs, torch.float32, grad=True)
        # A leaf behind the expanded element: it gets the sum of dx, and the hook sees dx itself.
        self.seen = []
        if isinstance(dx_to, str):
            dx_to = bf16(np.zeros((1, 1)), grad=True).expand(*x.codes.shape)
            dx_to.register_hook(self.seen.append)
        routed = counts_of(p), tensor(p.indices)
        self.out = layer.node(x.codes, *routed, self.probs, x_scale=x.scale_inv, dx_to=dx_to)

    def backward(self):
        self.out.backward(self.dout)
        return self

    @property
    def dx(self):
        (dx,) = self.seen
        assert dx.dtype == torch.bfloat16
        return numpy(dx)

    @property
    def dprobs(self):
        return numpy(self.probs.grad)


class GradientCall:
    """One forward on bf16 tokens; the gradient that autograd delivers is full of NaN."""

    def __init__(self, layer, source):
        p = layer.problem
        self.x, self.probs = (tensor(v, torch.float32, grad=True) for v in (p.x, p.probs))
        routed = counts_of(p), tensor(p.indices)
        x = self.x.to(torch.bfloat16)
        self.out = layer.node(x, *routed, self.probs, dout_source=source)

    def backward(self, **options):
        self.out.backward(bf16(np.full(tuple(self.out.shape), np.nan)), **options)
        return self

    @property
    def dx(self):
        return numpy(self.x.grad)

    @property
    def dprobs(self):
        return numpy(self.probs.grad)


def arriving(way, layer, arrived):
    """A forward of the layer on an x, or with a dout, that arrived so."""
    return TokensCall(layer, arrived) if way == "x" else GradientCall(layer, Source(arrived))


@pytest.mark.parametrize("way", ["x", "dout"])
class TestBothWays:
    """tests/oracle has the bits."""

    def test_an_engine_that_cannot_read_them_gets_their_values(self, way, caplog):
        arrived, layer = quantised(getattr(PROBLEM, way)), bf16_layer(PROBLEM, FULL)
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            call = [arriving(way, layer, arrived).backward() for _ in range(2)][-1]
        (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "dequantised to bfloat16" in warning.getMessage()
        assert warning.getMessage().endswith("and FP8 is off")
        plain, values = bf16_layer(PROBLEM, FULL), PROBLEM.but(**{way: numpy(to_bfloat16(arrived))})
        wanted = [plain.run(values) for _ in range(2)][-1]
        assert_same_bits(layer.result(call), plain.result(wanted))

    @pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])
    def test_a_dumped_step_is_healthy_and_holds_the_codes(self, way, fp8_wgrad, tmp_path):
        config = SonicMoEConfig(engine="reference", fp8_mode="perf", fp8_wgrad=fp8_wgrad)
        arrived, layer = quantised(getattr(PROBLEM, way)), bf16_layer(PROBLEM, config)
        layer.node.dump(tmp_path / "step.npz")
        arriving(way, layer, poisoned(arrived, PROBLEM)).backward()
        step = load_dump(tmp_path / "step.npz")
        served = ((PROBLEM.indices >= 0) & (PROBLEM.indices < PROBLEM.num_experts)).any(1)
        for found, wanted in (
            (getattr(step, way), dequantize(arrived)),
            (getattr(step, f"{way}_scale"), arrived.scale_inv),
            (getattr(step, f"{way}_codes"), arrived.bytes.to(torch.int32)),
        ):
            np.testing.assert_array_equal(found[served], numpy(wanted)[served])
        assert getattr(step, "dout_codes" if way == "x" else "x_codes") is None
        assert step.settings.dtype == "bfloat16"
        assert way == "x" or not step.dout[~served].any()
        report = bisect(step, "reference")
        assert report.healthy, report.fault
        assert f"wgrad_{way}" not in report.missing


class TestTokens:
    def test_without_a_receiver_nobody_gets_the_gradient(self, problem):
        layers, x = [bf16_layer(problem) for _ in range(2)], quantised(problem.x)
        alone = TokensCall(layers[0], x, dx_to=None).backward()
        usual = TokensCall(layers[1], x).backward()
        assert_equal(*(layer.gradients() for layer in layers))
        np.testing.assert_array_equal(alone.dprobs, usual.dprobs)


@pytest.mark.skipif(not IS_PADDLE, reason="PyTorch casts the gradient of an e4m3 tensor")
class TestPaddlesOwnGradient:
    """A PyLayer that delivers e4m3 and takes bf16 gradients, as PaddleFleet's dispatch is one."""

    def sent(self, problem, x):
        class Dispatch(PyLayer):
            @staticmethod
            def forward(ctx, tokens):
                ctx.set_grad_in_dtype_consistent(False)
                return x.codes.clone()

            @staticmethod
            def backward(ctx, dx):
                assert dx.dtype == paddle.bfloat16
                return dx

        source = bf16(problem.x)
        source.stop_gradient = False
        return source, Dispatch.apply(source)

    @pytest.mark.parametrize("again", [False, True], ids=["plain", "recomputed"])
    def test_x_itself_gets_dx_in_bf16(self, problem, again):
        x, layer = quantised(problem.x), bf16_layer(problem)
        source, codes = self.sent(problem, x)
        probs = tensor(problem.probs, torch.float32, grad=True)
        given = counts_of(problem), tensor(problem.indices)

        def call(codes, probs):
            return layer.node(codes, *given, probs, x_scale=x.scale_inv, dx_to=codes)

        out = recomputed(call, codes, probs, use_reentrant=False) if again else call(codes, probs)
        out.backward(bf16(problem.dout))
        np.testing.assert_array_equal(numpy(source.grad), run(problem, ISO128, x=x).dx)

    def recomputed(self, problem, x, receives):
        """dx after re-entrant recompute, which runs the forward again on detached inputs and passes
        on their gradients, which have their dtype.
        """
        layer = bf16_layer(problem)
        source, codes = self.sent(problem, x)
        dx_to = source.astype("float32").astype("bfloat16") if receives else codes

        def call(dx_to):
            given = counts_of(problem), tensor(problem.indices)
            probs = tensor(problem.probs, torch.float32)
            tokens = codes.detach() if receives else dx_to
            return layer.node(tokens, *given, probs, x_scale=x.scale_inv, dx_to=dx_to)

        recomputed(call, dx_to).backward(bf16(problem.dout))
        return numpy(source.grad)

    def test_recompute_that_hands_on_leaves_needs_a_bf16_receiver(self, problem):
        x = quantised(problem.x)
        with pytest.raises(OSError, match="dx_to is x, and x is a leaf"):
            self.recomputed(problem, x, receives=False)
        np.testing.assert_array_equal(
            self.recomputed(problem, x, receives=True), run(problem, ISO128, x=x).dx
        )


@pytest.mark.skipif(not IS_PADDLE, reason="PyTorch's checkpoint hands arguments through untouched")
def test_paddles_recompute_takes_it_by_position(problem):
    """Re-entrant recompute of the node itself refuses keyword-only arguments."""
    layer, dout = bf16_layer(problem), quantised(problem.dout)
    x = tensor(problem.x, torch.float32, grad=True)
    probs = tensor(problem.probs, torch.float32)
    given = counts_of(problem), tensor(problem.indices), probs, None, None, Source(dout)
    recomputed(layer.node, x.to(torch.bfloat16), *given).backward()
    np.testing.assert_array_equal(numpy(x.grad), run(problem, ISO128, dout).dx)


class TestGradients:
    def test_a_source_may_return_a_plain_gradient(self, problem):
        layer = bf16_layer(problem)
        call = GradientCall(layer, Source(bf16(problem.dout))).backward()
        assert_same_bits(layer.result(call), run(problem, ISO128))

    def test_it_is_asked_once_by_every_backward_and_by_no_forward(self, problem):
        layer, source = bf16_layer(problem), Source(quantised(problem.dout))
        call = GradientCall(layer, source)
        with torch.no_grad():
            GradientCall(layer, source)
        assert not source.asked
        call.backward()
        (asked,) = source.asked
        assert tuple(asked.shape) == (37, 256) and np.isnan(numpy(asked)).all()

    def test_codes_are_freed_when_the_backward_is_over(self, problem):
        layer, source = bf16_layer(problem), Source(quantised(problem.dout))
        memory = weakref.ref(source.gradient.scale_inv)
        call = GradientCall(layer, source).backward()
        source.gradient = None
        gc.collect()
        assert memory() is None
        del call

    def test_the_placeholder_is_no_finding(self, problem):
        with detect_nonfinite():
            GradientCall(bf16_layer(problem), Source(quantised(problem.dout))).backward()
