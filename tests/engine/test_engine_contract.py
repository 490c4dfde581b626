"""What every engine promises beyond numbers: poison, non-finite tokens, repetition, statelessness,
separate dx and dw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engine.fp8_layer import with_spare_rows
from engine.moe_golden import (
    ALL_ACTIVATIONS,
    MODES,
    SETTINGS,
    assert_same_bits,
    make_problem,
    run_engine,
    set_up,
    user_gradients,
)
from framework import numpy
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.quant.format import BlockScaledTensor


class TestPoison:
    """No output depends on a byte that the call did not write or that no valid slot names."""

    @MODES
    def test_more_rows_than_needed(self, settings):
        """A builder that does not know the counts sizes its rows for the worst case; the rest is
        padding too.
        """
        setup = set_up(make_problem(bias=True), settings)
        oversized = replace(setup, routing=with_spare_rows(setup.routing, 256))
        assert_same_bits(oversized.run(), setup.run())

    @MODES
    def test_padding_rows_of_wgrad_operands_are_zero(self, settings):
        """A GPU kernel may read whole tiles: what backward hands over holds finite zeros beyond the
        true rows.
        """
        setup = set_up(make_problem(bias=True), settings)
        pending = setup.pending()
        padding = numpy(setup.routing.row_slot) < 0
        assert padding.any()
        for rows in (pending.dz, pending.y1s):
            assert not numpy(rows)[padding].any()
            assert numpy(rows)[~padding].any()


class TestNonFiniteTokens:
    @pytest.mark.parametrize(
        ("activation", "mode", "value", "where"),
        pairwise(ALL_ACTIVATIONS, list(SETTINGS), [np.nan, np.inf, -np.inf], ["x", "dout"]),
        ids=str,
    )
    def test_stay_in_their_token_and_never_become_finite(self, activation, mode, value, where):
        settings = SETTINGS[mode]
        problem, token, expected, whole = self.healthy_runs(settings, where, activation)
        bad = getattr(problem, where).copy()
        bad[token, 3] = value
        actual = run_engine(problem.but(**{where: bad}), settings)
        others = np.arange(40) != token
        assert_same_bits(actual, expected, ("out", "dx", "dprobs"), others)
        if where == "x" and (np.isnan(value) or settings.recipe is not None):
            assert np.isnan(actual.out[token]).all()
        elif where == "x":
            assert not np.isfinite(actual.out[token]).all()
        else:
            assert_same_bits(actual, whole, ("out",))
        assert not np.isfinite(actual.dprobs[token]).any()
        assert not np.isfinite(actual.dx[token]).all()

    @staticmethod
    @cache
    def healthy_runs(settings, where, activation):
        """A problem, one of its tokens, and what the engine makes of it with that token zero and as
        it is.
        """
        problem = make_problem(activation, tokens=40, hidden=32, intermediate=16, topk=2, empty=())
        token = int(np.flatnonzero(((problem.indices >= 0) & (problem.indices < 4)).all(1))[0])
        # The others' bits are those of a run where this token is zero: it takes no part in a shared
        # scale either.
        kept = (np.arange(40) != token)[:, None]
        zero = {name: getattr(problem, name) * kept for name in {where, "dout"}}
        healthy = run_engine(problem.but(**zero), settings), run_engine(problem, settings)
        return problem, token, *healthy

    @MODES
    def test_reach_the_gradients_of_their_experts_only(self, settings):
        problem = make_problem(topk=1, empty=(), tokens=60)
        token = int(np.flatnonzero(problem.indices[:, 0] == 1)[0])
        bad = problem.x.copy()
        bad[token, 0] = np.nan
        actual, expected = run_engine(problem.but(x=bad), settings), run_engine(problem, settings)
        for name in ("dw1", "dw2"):
            assert np.isnan(getattr(actual, name)[1]).any(), name
        assert_same_bits(actual, expected, ("dw1", "dw2"), [0, 2, 3])

    @MODES
    def test_a_weight_that_is_nan_reaches_every_token_of_its_expert(self, settings):
        problem = make_problem(topk=1, empty=(), tokens=60)
        up_gate = problem.up_gate.copy()
        up_gate[2, 7, 5] = np.nan
        actual = run_engine(problem.but(up_gate=up_gate), settings)
        expected = run_engine(problem, settings)
        here = problem.indices[:, 0] == 2
        assert np.isnan(actual.out[here]).all()
        assert_same_bits(actual, expected, ("out", "dx"), ~here)


class TestRepetition:
    @MODES
    def test_interleaved_calls_do_not_see_each_other(self, settings):
        """Three forwards before three backwards in another order, on one engine: the bits of three
        separate runs.
        """
        engine = ReferenceEngine()
        problems = [make_problem(seed=s, tokens=20 + 30 * s, bias=True) for s in range(3)]
        setups = [set_up(problem, settings, engine=engine) for problem in problems]
        alone = [setup.run() for setup in setups]
        forwards = [setup.forward() for setup in setups]
        for i in (1, 2, 0):
            assert_same_bits(setups[i].backward(*forwards[i]), alone[i])

    @MODES
    def test_dx_and_dw_are_separate_and_may_be_reordered(self, settings):
        setups = [set_up(make_problem(seed=s, bias=True), settings) for s in range(2)]

        def backward(order):
            shared = setups[0].accumulators()
            outs, pendings, results = {}, {}, {}
            for stage, i in order:
                setup = setups[i]
                if stage == "dx":
                    outs[i], saved = setup.forward()
                    *results[i], pendings[i] = setup.engine.backward_dx(
                        setup.dout, saved, setup.weights
                    )
                else:
                    setup.engine.backward_dw(pendings[i], shared)
            return [setups[i].result(outs[i], *results[i], shared) for i in range(2)]

        straight = backward([("dx", 0), ("dw", 0), ("dx", 1), ("dw", 1)])
        delayed = backward([("dx", 0), ("dx", 1), ("dw", 1), ("dw", 0)])
        for one, other in zip(straight, delayed, strict=True):
            assert_same_bits(one, other)

    @MODES
    def test_arguments_are_never_written(self, settings):
        setup = set_up(make_problem(bias=True), settings)
        biases = setup.weights.b1, setup.weights.b2
        arguments = [setup.x, setup.dout, *setup.routing.tensors(), *biases]
        for weight in (setup.weights.w1, setup.weights.w2_dgrad):
            quantised = isinstance(weight, BlockScaledTensor)
            arguments += [weight.codes, weight.scale_inv] if quantised else [weight]
        before = [numpy(argument).copy() for argument in arguments]
        setup.run()
        for argument, old in zip(arguments, before, strict=True):
            assert np.array_equal(numpy(argument), old)


@MODES
def test_an_expert_without_tokens_is_left_untouched(settings):
    """Accumulators that hold something keep every bit of it; a NaN that must not be read stays one."""
    problem = make_problem(bias=True, empty=(1, 2))
    setup = set_up(problem, settings)
    accumulators = setup.accumulators()
    for held in accumulators.tensors():
        held[1] = held[1] + 7.25
        held[2] = held[2] + float("nan")
    _, saved = setup.forward()
    setup.engine.backward(setup.dout, saved, setup.weights, accumulators)
    for gradient in user_gradients(problem, accumulators):
        assert (gradient[1] == 7.25).all()
        assert np.isnan(gradient[2]).all()
        assert np.isfinite(gradient[0]).all()
        assert gradient[0].any()
