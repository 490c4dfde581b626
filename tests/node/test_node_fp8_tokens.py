"""The node on tokens that arrive in FP8: the engine's bits, the gradient where it belongs, and
refusals by name.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from engine.fp8_arrivals import FORMS, ISO128, poisoned, problem_with_idle_tokens, quantised, run
from engine.moe_golden import assert_same_bits
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, counts_of, want_gradient

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import captured_calls
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.errors import DeviceError, DTypeError, ShapeError
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import to_bfloat16, tokens_of

if IS_PADDLE:
    import paddle
    from paddle.autograd import PyLayer
    from paddle.distributed.fleet.utils import recompute


@pytest.fixture(scope="module")
def problem():
    return problem_with_idle_tokens()


class Call:
    """One forward on quantised tokens, with the gradient going to an expanded element."""

    def __init__(self, layer, x, *, dx_to="expanded", x_grad=True, **changes):
        p, self.x = layer.problem, x
        self.probs = tensor(p.probs, torch.float32, grad=True)
        self.indices, self.counts = tensor(p.indices), counts_of(p)
        self.dout = tensor(p.dout, torch.float32).to(torch.bfloat16)
        # A leaf behind the expanded element: it gets the sum of dx, and the hook sees dx itself.
        self.seen = []
        if isinstance(dx_to, str):
            leaf = tensor(np.zeros((1, 1)), torch.float32, grad=True)
            dx_to = leaf.to(torch.bfloat16).expand(*x.codes.shape)
            dx_to.register_hook(self.seen.append)
        self.dx_to = dx_to
        given = {"x_scale": x.scale_inv, "dx_to": dx_to} | changes
        self.out = layer.node(x.codes, self.counts, self.indices, self.probs, **given)

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


def bf16_layer(problem, config=FP8, **options):
    layer = Layer(problem, dtype=torch.bfloat16, config=config, **options)
    layer.set_main_grad(0.0)
    return layer


@FORMS
def test_gives_the_bits_of_the_engine(problem, row):
    x, layer = quantised(problem.x, row), bf16_layer(problem)
    call = Call(layer, x).backward()
    layer.node.step()
    assert call.out.dtype == torch.bfloat16
    assert_same_bits(layer.result(call), run(problem, ISO128, x=x))


@pytest.mark.parametrize("config", [FP8, FULL], ids=["fp8", "full"])
@FORMS
def test_rows_without_a_valid_slot_are_never_read(problem, row, config):
    x, results = quantised(problem.x, row), []
    for given in (x, poisoned(x, problem)):
        layer = bf16_layer(problem, config)
        call = Call(layer, given).backward()
        layer.node.step()
        results.append(layer.result(call))
    assert_same_bits(*results)
    assert all(np.isfinite(value).all() for _, value in results[1].items())


@FORMS
def test_an_engine_that_cannot_read_them_gets_their_values(problem, row, caplog):
    x = quantised(problem.x, row)
    layer, plain = (bf16_layer(problem, FULL) for _ in range(2))
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        calls = [Call(layer, x).backward() for _ in range(2)]
    layer.node.step()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "dequantised to bfloat16, because tokens come as" in warning.getMessage()
    assert warning.getMessage().endswith("and FP8 is off")
    values = plain.problem.but(x=numpy(to_bfloat16(x)))
    for _ in range(2):
        expected = plain.run(values)
    plain.node.step()
    assert_same_bits(layer.result(calls[1]), plain.result(expected))


def test_without_a_receiver_nobody_gets_the_gradient(problem):
    layer, other = bf16_layer(problem), bf16_layer(problem)
    x = quantised(problem.x)
    call, usual = Call(layer, x, dx_to=None).backward(), Call(other, x).backward()
    np.testing.assert_array_equal(call.dprobs, usual.dprobs)
    for one, wanted in zip(layer.gradients("main_grad"), other.gradients("main_grad"), strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_inference_keeps_nothing(problem):
    layer, x = bf16_layer(problem), quantised(problem.x)
    trained = numpy(Call(layer, x).out)
    with torch.no_grad():
        out = Call(layer, x, dx_to=None).out
    np.testing.assert_array_equal(numpy(out), trained)


def test_no_tokens(problem):
    empty = problem.but(
        **{name: getattr(problem, name)[:0] for name in ("x", "indices", "probs", "dout")}
    )
    layer = bf16_layer(empty)
    codes = tensor(np.zeros((0, 256)), torch.float32).to(torch.float8_e4m3fn)
    call = Call(layer, tokens_of(codes, tensor(np.zeros((0, 2)), torch.float32)))
    assert tuple(call.out.shape) == (0, 256) and call.out.dtype == torch.bfloat16


def test_weight_gradients_that_are_put_off(problem):
    x = quantised(problem.x)
    layer, usual = bf16_layer(problem, split_wgrad=True), bf16_layer(problem)
    for one in (layer, usual):
        call = Call(one, x).backward()
        one.node.step()
    assert_same_bits(layer.result(call), usual.result(call))


def test_a_write_to_the_scales_before_the_backward_is_refused(problem):
    layer, x = bf16_layer(problem), quantised(problem.x)
    call = Call(layer, x)
    with torch.no_grad():
        x.scale_inv.add_(x.scale_inv)
    # Paddle raises an OSError in place of what a backward raises.
    with pytest.raises(
        (RuntimeError, OSError), match=r"modified by an inplace|x_scale was written"
    ):
        call.backward()


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

        source = tensor(problem.x, torch.float32).astype("bfloat16")
        source.stop_gradient = False
        return source, Dispatch.apply(source)

    @FORMS
    @pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
    def test_x_itself_gets_dx_in_bf16(self, problem, row, recomputed):
        x, layer = quantised(problem.x, row), bf16_layer(problem)
        source, codes = self.sent(problem, x)
        probs = tensor(problem.probs, torch.float32, grad=True)

        def call(codes, probs):
            return layer.node(
                codes, counts_of(problem), tensor(problem.indices), probs,
                x_scale=x.scale_inv, dx_to=codes,
            )  # fmt: skip

        again = {"use_reentrant": False}
        out = recompute(call, codes, probs, **again) if recomputed else call(codes, probs)
        out.backward(tensor(problem.dout, torch.float32).astype("bfloat16"))
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

        recompute(call, dx_to).backward(tensor(problem.dout, torch.float32).astype("bfloat16"))
        return numpy(source.grad)

    def test_recompute_that_hands_on_leaves_needs_a_bf16_receiver(self, problem):
        x = quantised(problem.x)
        with pytest.raises(OSError, match="dx_to is x, and x is a leaf"):
            self.recomputed(problem, x, receives=False)
        np.testing.assert_array_equal(
            self.recomputed(problem, x, receives=True), run(problem, ISO128, x=x).dx
        )

    def test_a_leaf_is_refused(self, problem):
        x = quantised(problem.x)
        x.codes.stop_gradient = False
        with pytest.raises(DTypeError, match="x is a leaf, whose gradient Paddle casts"):
            Call(bf16_layer(problem), x, dx_to=x.codes)


@pytest.mark.skipif(IS_PADDLE, reason="PyTorch's checkpoint")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_recompute(problem, reentrant):
    from torch.utils.checkpoint import checkpoint

    x, layer = quantised(problem.x), bf16_layer(problem)
    dx_to = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True).expand(*x.codes.shape)
    seen = []
    dx_to.register_hook(seen.append)
    probs = tensor(problem.probs, torch.float32, grad=True)

    def call(dx_to, probs):
        given = counts_of(problem), tensor(problem.indices), probs
        return layer.node(x.codes, *given, x_scale=x.scale_inv, dx_to=dx_to)

    checkpoint(call, dx_to, probs, use_reentrant=reentrant).backward(
        tensor(problem.dout, torch.float32).to(torch.bfloat16)
    )
    np.testing.assert_array_equal(numpy(seen[0]), run(problem, ISO128, x=x).dx)


class TestDiagnostics:
    @pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])
    @FORMS
    def test_a_dumped_step_is_healthy_and_holds_the_codes(self, problem, row, fp8_wgrad, tmp_path):
        config = SonicMoEConfig(engine="reference", fp8_mode="perf", fp8_wgrad=fp8_wgrad)
        x, layer = quantised(problem.x, row), bf16_layer(problem, config)
        layer.node.dump(tmp_path / "step.npz")
        Call(layer, poisoned(x, problem)).backward()
        step = load_dump(tmp_path / "step.npz")
        served = ((problem.indices >= 0) & (problem.indices < problem.num_experts)).any(1)
        np.testing.assert_array_equal(step.x[served], numpy(dequantize(x))[served])
        np.testing.assert_array_equal(step.x_scale[served], numpy(x.scale_inv)[served])
        np.testing.assert_array_equal(step.x_codes[served], numpy(x.bytes.to(torch.int32))[served])
        assert step.settings.dtype == "bfloat16" and step.has_row_scales("x") == row
        report = bisect(step, "reference")
        assert report.healthy, report.fault
        assert ("wgrad_x" in report.missing) == (row and fp8_wgrad)

    def test_a_dump_without_half_of_the_tokens_is_refused(self, problem, tmp_path):
        layer = bf16_layer(problem)
        layer.node.dump(tmp_path / "step.npz")
        Call(layer, quantised(problem.x)).backward()
        step = load_dump(tmp_path / "step.npz")
        with pytest.raises(ShapeError, match="x_codes has shape None and x_scale"):
            step.but(x_codes=None)
        with pytest.raises(ShapeError, match=r"x_scale has shape \(37, 5\)"):
            step.but(x_scale=np.zeros((37, 5)))

    def test_a_captured_call_holds_the_values(self, problem):
        x = quantised(problem.x)
        with captured_calls("call") as cases:
            Call(bf16_layer(problem), x).backward()
        np.testing.assert_array_equal(cases[0].x[1], numpy(to_bfloat16(x))[1])

    def test_the_first_nan_is_found(self, problem):
        x = quantised(problem.x)
        scale = numpy(x.scale_inv)
        scale[1, 0] = np.nan
        x = tokens_of(x.codes, tensor(scale, torch.float32))
        with pytest.raises(NonFiniteError, match="input x at token 1"), detect_nonfinite():
            Call(bf16_layer(problem), x)


class TestRefusals:
    def refused(self, problem, error, words, **changes):
        x = quantised(problem.x)
        given = {"codes": x.codes, "x_scale": x.scale_inv} | changes
        layer, codes = bf16_layer(problem), given.pop("codes")
        with pytest.raises(error, match=words):
            layer.node(
                codes, None, tensor(problem.indices), tensor(problem.probs, torch.float32), **given
            )

    def test_codes_and_scales_come_together(self, problem):
        self.refused(
            problem, DTypeError, r"float8_e4m3fn without its scales.*x_scale, float32", x_scale=None
        )
        bf16 = tensor(problem.x, torch.float32).to(torch.bfloat16)
        self.refused(problem, DTypeError, "x_scale came with x in bfloat16", codes=bf16)
        self.refused(
            problem,
            DTypeError,
            "dx_to came with x in bfloat16",
            codes=bf16,
            x_scale=None,
            dx_to=bf16,
        )
        pair = (quantised(problem.x).codes, quantised(problem.x).scale_inv)
        self.refused(problem, DTypeError, "x is a tuple.*as x_scale", codes=pair, x_scale=None)

    def test_dtypes(self, problem):
        other = tensor(problem.x, torch.float32).to(torch.float8_e5m2)
        self.refused(problem, DTypeError, "x is float8_e5m2", codes=other)
        words = quantised(problem.x).scale_inv.view(torch.int32)
        self.refused(problem, DTypeError, "x_scale is int32; needed: float32", x_scale=words)
        self.refused(
            problem, TypeError, "x_scale must be a", x_scale=numpy(quantised(problem.x).scale_inv)
        )

    @pytest.mark.parametrize("shape", [(37, 3), (36, 2), (37,), (37, 256)])
    def test_shapes(self, problem, shape):
        self.refused(
            problem, ShapeError, r"x_scale has shape .* needs \[T, ceil\(H/128\)\] = \(37, 2\), or",
            x_scale=tensor(np.ones(shape), torch.float32),
        )  # fmt: skip

    def test_strides(self, problem):
        by_columns = tensor(np.ones((2, 37)), torch.float32).transpose(0, 1)
        if not by_columns.is_contiguous():
            self.refused(problem, ShapeError, "x_scale has strides .*needed: contiguous", x_scale=by_columns)  # fmt: skip

    def test_the_receiver_of_the_gradient(self, problem):
        fp32 = tensor(problem.x, torch.float32, grad=True)
        self.refused(problem, DTypeError, "dx_to is float32; needed: bfloat16", dx_to=fp32)
        bf16 = fp32.to(torch.bfloat16)
        self.refused(problem, ShapeError, r"dx_to has shape \(36, 256\)", dx_to=bf16[:36])
        self.refused(problem, TypeError, "dx_to must be a", dx_to=problem.x)

    def test_codes_that_want_a_gradient(self, problem):
        codes = quantised(problem.x).codes
        want_gradient(codes, True)
        self.refused(problem, DTypeError, "x wants a gradient, and autograd would cast it", codes=codes)  # fmt: skip
        if not IS_PADDLE:
            self.refused(problem, DTypeError, "PyTorch casts the gradient", codes=codes, dx_to=codes)  # fmt: skip

    @pytest.mark.skipif(IS_PADDLE, reason="a meta device is PyTorch's")
    def test_devices(self, problem):
        scale = quantised(problem.x).scale_inv.to("meta")
        self.refused(problem, DeviceError, "x_scale is on meta but x is on cpu", x_scale=scale)
        anchor = torch.zeros(37, 256, dtype=torch.bfloat16, device="meta")
        self.refused(problem, DeviceError, "dx_to is on meta", dx_to=anchor)
