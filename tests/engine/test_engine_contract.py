"""What the reference engine promises beyond the laws of tests/oracle: spare rows, padding rows of operands,
and weights that are NaN.
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
