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
def test_an_abort_of_gloos_is_none_where_something_was_raised(before: str) -> None:
    said = f"{before}\nterminate called without an active exception"
    program = f"import os; os.write(2, {said!r}.encode()); os.abort()"
    if before == "a warning":
        run_world(lambda rank: ["-c", program], [{}])
        return
    with pytest.raises(AssertionError, match="rank 0 exited with -6"):
        run_world(lambda rank: ["-c", program], [{}])
