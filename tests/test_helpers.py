"""A helper that all tests share: pairs of values."""

from __future__ import annotations

import itertools

from pairwise import pairwise


def test_every_pair_is_covered_by_few_cases() -> None:
    values = (range(4), "abc", (True, False), (None, 1.5))
    cases = pairwise(*values)
    for first, second in itertools.combinations(range(4), 2):
        covered = {(case[first], case[second]) for case in cases}
        assert covered == set(itertools.product(values[first], values[second]))
    assert len(cases) <= 14 and cases == pairwise(*values)
