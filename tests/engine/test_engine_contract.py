"""What every engine promises beyond numbers: poison, non-finite tokens, repetition, statelessness,
separate dx and dw.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from engine.fp8_layer import with_spare_rows
from engine.moe_golden import (
    MODES,
    assert_same_bits,
    make_problem,
    run_engine,
    set_up,
    user_gradients,
)
from framework import numpy


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
        padding = numpy(setup.routing.row_token) < 0
        assert padding.any()
        for rows in (pending.dz, pending.y1s):
            assert not numpy(rows)[padding].any()
            assert numpy(rows)[~padding].any()


class TestNonFiniteTokens:
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
