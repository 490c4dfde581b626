"""Helpers that all tests share: pairs of values, worlds of processes."""

from __future__ import annotations

import itertools

import pytest
from pairwise import pairwise
from worlds import run_world


def test_every_pair_is_covered_by_few_cases() -> None:
    values = (range(4), "abc", (True, False), (None, 1.5))
    cases = pairwise(*values)
    for first, second in itertools.combinations(range(4), 2):
        covered = {(case[first], case[second]) for case in cases}
        assert covered == set(itertools.product(values[first], values[second]))
    assert len(cases) <= 14 and cases == pairwise(*values)


@pytest.mark.parametrize("before", ["a warning", "Traceback (most recent call last):"])
def test_an_abort_of_gloos_counts_where_nothing_was_raised_before_it(before: str) -> None:
    lines = [before, "terminate called without an active exception"]
    program = f"import os; print('done', flush=True); os.write(2, {chr(10).join(lines)!r}.encode()); os.abort()"
    command = ["-c", program]
    if before.startswith("Traceback"):
        with pytest.raises(AssertionError, match="rank 0 exited with -6"):
            run_world(lambda rank: command, [{}])
    else:
        assert run_world(lambda rank: command, [{}]) == ["done\n"]
