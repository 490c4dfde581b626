"""What the Hopper engine prepares on a host."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from engine.moe_golden import make_problem, native_weights
from framework import IS_PADDLE, tensor, torch

from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.weight_source import WeightSource
from sonicmoe.weights.cache import PreparedWeights
from sonicmoe.weights.changes import Traces

FP8 = EngineSettings(recipe=RECIPES["dx256"])
ENGINE = HopperEngine()


def source(dtype=torch.bfloat16, experts=2, hidden=144, inner=64):
    """Native matrices, as views of two stacked tensors."""
    problem = make_problem(experts=experts, hidden=hidden, intermediate=inner)
    w1, w2, _, _ = native_weights(problem)
    w1, w2 = (tensor(w, torch.float32).to(dtype) for w in (w1, w2))
    return WeightSource(tuple(w1.unbind(0)), tuple(w2.unbind(0)))


def stacked(given):
    return torch.stack(list(given.up)), torch.stack(list(given.down))


def same(a, b):
    codes = [q.codes.view(torch.uint8).to(torch.int64) for q in (a, b)]
    equal = bool((codes[0] == codes[1]).all()) and a.scale_inv.shape == b.scale_inv.shape
    return equal and bool((a.scale_inv == b.scale_inv).all())


def test_weights_that_changed_are_quantised_again():
    """On the host the exact quantiser serves: what is prepared equals the reference engine's."""
    first, given = ENGINE.refresh(source(inner=192), FP8), source(inner=192)
    with torch.no_grad():
        for matrix in (*given.up, *given.down):
            matrix.copy_(matrix * 0.5)
    again = ENGINE.refresh(given, FP8, first, written=False)
    assert again.store is first.store
    wanted = ReferenceEngine().prepare_weights(*stacked(given), None, None, FP8)
    assert same(again.w1, wanted.w1) and same(again.w2, wanted.w2)
    assert again.w1_dgrad.shape == wanted.w1.shape and again.w1_dgrad.codes.shape == (2, 144, 384)
    assert (again.num_experts, again.hidden_size, again.intermediate_size) == (2, 144, 192)


class TestPreparedWeightsOnADevice:
    """Brought up to date without their source, which lies where it lay: kernels that do nothing."""

    @pytest.fixture
    def launched(self, monkeypatch):
        """Whether each launch was told to quantise whatever the guard finds; "fail" makes one fail."""
        calls = []

        def quantize(*arguments):
            if calls and calls[-1] == "fail":
                raise MemoryError
            calls.append(arguments[-2])

        kernels = SimpleNamespace(
            num_checksums=lambda *_: 1,
            store_addresses=lambda *_: None,
            check_weights=lambda *_: None,
            quantize_weights=quantize,
        )
        monkeypatch.setattr(gpu, "_kernels", lambda device: kernels)
        monkeypatch.setattr(gpu, "is_cuda", lambda tensor: True)
        return calls

    def test_a_known_write_is_quantised_whatever_a_sample_shows(self, launched):
        weights = ENGINE.refresh(WeightSource.stacked(*stacked(source())), FP8)
        assert all(ENGINE.keep(weights, written) for written in (False, True, False))
        assert launched == [True, False, True, False]

    @pytest.mark.parametrize(
        "look", [ENGINE.keep, partial(ENGINE.keep, written=True)], ids=["look", "write"]
    )
    def test_a_source_is_asked_for_where_it_must_be_read(self, launched, look):
        """Biases, copies of weights that are not contiguous, and codes of a launch that failed."""
        w1, w2 = stacked(source())
        given = WeightSource.stacked(w1, w2)
        with_biases = replace(given, b1=torch.zeros((2, 128)), b2=torch.zeros((2, 144)))
        turned = w1.transpose(1, 2).contiguous().transpose(1, 2)
        copied = [] if IS_PADDLE else [WeightSource.stacked(turned, w2)]
        for read in (with_biases, *copied):
            assert not look(ENGINE.refresh(read, FP8))
        weights = ENGINE.refresh(given, FP8)
        launched.append("fail")
        with pytest.raises(MemoryError):
            ENGINE.refresh(given, FP8, weights, written=False)
        assert not look(weights)

    @pytest.mark.parametrize("writes", [0, 1])
    def test_backwards_order_is_added_in_place(self, launched, writes):
        """A write shows as always."""
        prepared, given = PreparedWeights(), WeightSource.stacked(*stacked(source()))

        def read(writes, **how):
            of_call = ENGINE, FP8, lambda: given, given.anchor, (), Traces((writes,))
            return prepared.read(*of_call, **how)

        early = read(0, alone=True)
        weights = early.weights
        assert not weights.two_orders and None in weights.store._quantize_arguments
        assert read(writes).weights is weights and weights.two_orders
        assert None not in weights.store._quantize_arguments and launched == [True, True]
        assert read(writes, alone=True).weights is weights and launched[2:] == [False]
        refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with refused if writes else nullcontext():
            early.check_current()
