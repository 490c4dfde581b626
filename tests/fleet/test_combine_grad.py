"""PaddleFleet's handle of a gradient that the combine sent in FP8: read when the backward runs,
emptied then, and nothing guessed where it is empty or somebody else's.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from engine.fp8_arrivals import ISO128, run
from engine.moe_golden import make_problem
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import counts_of
from node.test_node_fp8 import RAISED, bf16_layer

from sonicmoe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from sonicmoe.fleet import carrier
from sonicmoe.fleet.carrier import declare_carrier, tokens_from_carrier
from sonicmoe.fleet.combine_grad import CombineGradient, combine_gradient
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast as quantize_fast
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.tokens import quantize_tokens

if IS_PADDLE:
    from paddle.autograd import PyLayer
    from paddle.distributed.fleet.utils import recompute

WORDS = ("fp32_1x128", "fp32_row", "e8m0_1x32")


@pytest.fixture(autouse=True)
def undeclared(monkeypatch):
    monkeypatch.setattr(carrier, "_declared", None)


@pytest.fixture(scope="module")
def problem():
    return make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)


def bf16(values):
    return tensor(values, torch.float32).to(torch.bfloat16)


def as_bytes(words):
    """What Fleet makes of packed words when they have arrived."""
    return words.view(torch.uint8)


def filled(dout):
    """A handle as Fleet's combine leaves it: codes, and the bytes of packed words."""
    codes, words = quantize_fast(dout, pack_scale_words=True)
    return {"data": codes, "scale": as_bytes(words)}


def bits(tokens):
    return numpy(tokens.bytes.to(torch.int32)), numpy(tokens.scale_inv)


class TestTheHandle:
    @pytest.mark.parametrize("words", WORDS)
    @pytest.mark.parametrize("packed", ["bytes", "words"])
    def test_packed_words_of_every_meaning(self, problem, words, packed):
        declare_carrier(words)
        dout = bf16(problem.dout)
        codes, scale = quantize_fast(dout, pack_scale_words=True)
        handle = {"data": codes, "scale": as_bytes(scale) if packed == "bytes" else scale}
        found = CombineGradient(handle).take(dout)
        wanted = tokens_from_carrier(codes, scale).tokens
        for one, other in zip(bits(found), bits(wanted), strict=True):
            np.testing.assert_array_equal(one, other)
        assert (found.scale_inv.shape[1] == 1) == (words == "fp32_row")

    @pytest.mark.parametrize("scale_dtype", ["int32", "float32"])
    def test_scales_that_are_not_packed(self, problem, scale_dtype):
        """One E8M0 byte a word, as the allgather dispatcher asks for, and fp32 multipliers."""
        dout = bf16(problem.dout)
        codes, scale = quantize_fast(dout, scale_dtype=getattr(torch, scale_dtype))
        found = CombineGradient({"data": codes, "scale": scale}).take(dout)
        assert isinstance(found, BlockScaledTensor) and found.scale_inv.shape[1] == 2

    def test_is_emptied_after_use_and_holds_no_memory(self, problem):
        handle = filled(bf16(problem.dout))
        memory = weakref.ref(handle["scale"])
        source = CombineGradient(handle)
        found = source.take(bf16(problem.dout))
        assert handle == {}
        del found
        gc.collect()
        assert memory() is None

    def test_is_read_late(self, problem):
        """Empty in the forward, filled before the backward."""
        handle = {}
        source = combine_gradient(handle)
        handle.update(filled(bf16(problem.dout)))
        assert isinstance(source.take(bf16(problem.dout)), BlockScaledTensor)

    def test_a_placeholder_is_not_read(self, problem):
        nan = bf16(np.full((37, 256), np.nan))
        found = CombineGradient(filled(bf16(problem.dout))).take(nan)
        wanted = quantize_tokens(bf16(problem.dout))
        np.testing.assert_array_equal(bits(found)[0], bits(wanted)[0])

    def test_no_handle_is_no_source(self):
        assert combine_gradient(None) is None

    def test_a_combine_that_did_not_send_fp8_leaves_it_empty(self, problem):
        """A group of one rank, and a combine under refined recompute."""
        dout = bf16(problem.dout)
        assert CombineGradient({}).take(dout) is dout


class TestRefusals:
    def refused(self, problem, error, words, handle, gradient=None):
        gradient = bf16(problem.dout) if gradient is None else gradient
        before = dict(handle)
        with pytest.raises(error, match=words):
            CombineGradient(handle).take(gradient)
        assert handle.keys() == before.keys()  # whoever gets the error finds what it is about

    def test_codes_and_an_empty_handle(self, problem):
        codes = filled(bf16(problem.dout))["data"]
        words = "float8_e4m3fn and fp8_combine_grad_handle is empty; the backward of the combine fills it"
        self.refused(problem, ConfigError, words, {}, codes)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_a_second_backward_that_finds_it_empty(self, problem, dtype):
        gradient = bf16(problem.dout)
        source = CombineGradient(filled(gradient))
        source.take(gradient)
        with pytest.raises(ConfigError, match="an earlier backward of this forward took"):
            source.take(gradient.to(getattr(torch, dtype)))

    def test_an_entry_of_fleets_own_is_left_alone(self, problem):
        gradient = bf16(problem.dout)
        for handle in ({"using_sonic_moe": True} | filled(gradient), {"using_sonic_moe": True}):
            was_filled = "data" in handle
            found = CombineGradient(handle).take(gradient)
            assert isinstance(found, BlockScaledTensor) is was_filled
            assert handle == {"using_sonic_moe": True}

    @pytest.mark.parametrize(
        "keys", [("data",), ("scale",), ("data", "scale", "event"), ("handle",), ("fn", "fn_args")]
    )
    def test_keys(self, problem, keys):
        made = filled(bf16(problem.dout))
        handle = {key: made.get(key, 1) for key in keys}
        self.refused(problem, ConfigError, r"has the keys .*needed: \['data', 'scale'\]", handle)

    def test_types(self, problem):
        made = filled(bf16(problem.dout))
        for key, value, words in (
            ("data", None, "'data'] is NoneType; needed: a tensor"),
            ("scale", (made["scale"],), "'scale'] is tuple; needed: a tensor"),
            ("data", bf16(problem.dout), "'data'] is bfloat16; needed: float8_e4m3fn"),
            ("scale", bf16(problem.dout), "scale is bfloat16; needed: float32, int32 or uint8"),
        ):
            self.refused(problem, DTypeError, words.replace("]", r"\]"), made | {key: value})
        for other in ([], "data", CombineGradient({})):
            with pytest.raises(DTypeError, match="needed: a dict, or None"):
                combine_gradient(other)

    def test_shapes(self, problem):
        made, other = filled(bf16(problem.dout)), filled(bf16(problem.dout[:36]))
        words = r"'data'\] has shape \(36, 256\); .* \(37, 256\): needed: the handle of the same"
        self.refused(problem, ShapeError, words, other)
        self.refused(
            problem, ShapeError, r"handle\['data'\] and \['scale'\]: scale is uint8 \(36, 8\)",
            made | {"scale": other["scale"]},
        )  # fmt: skip

    def test_packed_words_without_a_declaration(self, problem, monkeypatch):
        made = filled(bf16(problem.dout))
        monkeypatch.setattr(carrier, "_declared", None)
        self.refused(problem, ConfigError, "nobody declared whether they are fp32", made)

    @pytest.mark.skipif(IS_PADDLE, reason="PyTorch's meta device stands in for another device")
    def test_devices(self, problem):
        made = filled(bf16(problem.dout))
        words = r"'data'\] is on meta but the gradient is on cpu"
        self.refused(problem, DeviceError, words, made | {"data": made["data"].to("meta")})
        self.refused(
            problem, DeviceError, "scale is on meta", made | {"scale": made["scale"].to("meta")}
        )


@pytest.mark.skipif(not IS_PADDLE, reason="PaddleFleet's combine, whose gradient is e4m3")
class TestUnderPaddle:
    """The experts between PyLayers that do what Fleet's combine does."""

    def combine(self, out, handle, *, fp8=True):
        class Combine(PyLayer):
            @staticmethod
            def forward(ctx, out):
                return out.clone()

            @staticmethod
            def backward(ctx, dout):
                if not fp8:
                    return dout
                handle.update(filled(dout))
                return handle["data"]

        return Combine.apply(out)

    def inputs(self, problem):
        x = tensor(problem.x, torch.float32, grad=True)
        return x, tensor(problem.probs, torch.float32, grad=True)

    def call(self, layer, x, probs, handle):
        given = counts_of(layer.problem), tensor(layer.problem.indices), probs, None, None
        return layer.node(x.astype("bfloat16"), *given, combine_gradient(handle))

    @pytest.mark.parametrize("way", ["plain", "recomputed", "recomputed again"])
    def test_the_experts_take_codes_and_scales(self, problem, way):
        layer, handle = bf16_layer(problem), {}
        x, probs = self.inputs(problem)

        def experts(x, probs):
            return self.call(layer, x, probs, handle)

        again = {"use_reentrant": way == "recomputed"}
        plain = way == "plain"
        out = experts(x, probs) if plain else recompute(experts, x, probs, **again)
        self.combine(out, handle).backward(bf16(problem.dout))
        assert handle == {}
        wanted = run(problem, ISO128, quantize_tokens(bf16(problem.dout)))
        np.testing.assert_array_equal(numpy(x.grad), wanted.dx)
        np.testing.assert_array_equal(numpy(probs.grad), wanted.dprobs)

    def test_a_bf16_gradient_beside_an_empty_handle(self, problem):
        layer, handle = bf16_layer(problem), {}
        x, probs = self.inputs(problem)
        self.combine(self.call(layer, x, probs, handle), handle, fp8=False).backward(
            bf16(problem.dout)
        )
        np.testing.assert_array_equal(numpy(x.grad), run(problem, ISO128).dx)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, "fp8_combine_grad_handle is empty; the backward of the combine fills it"),
            (None, "dout is float8_e4m3fn without its scales"),
        ],
    )
    def test_experts_that_were_given_another_handle_or_none(self, problem, given, words):
        layer = bf16_layer(problem)
        out = self.combine(self.call(layer, *self.inputs(problem), given), {})
        with pytest.raises(RAISED, match=words):
            out.backward(bf16(problem.dout))
        assert not any(gradient.any() for gradient in layer.gradients("main_grad"))
