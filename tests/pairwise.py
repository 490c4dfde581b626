"""Cases that cover every pair of values of several parameters, in place of their whole product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Tuples of one value per parameter, such that each pair of values of two parameters is in one
    of them. The same arguments give the same cases, because test names must not change by chance.
    """
    cases = list(itertools.product(*values))
    covered = [_pairs(case) for case in cases]
    missing = set().union(*covered)
    chosen = []
    while missing:
        # The first of the cases that cover the most pairs which nobody has covered.
        best = max(range(len(cases)), key=lambda number: len(missing & covered[number]))
        missing -= covered[best]
        chosen.append(cases[best])
    return chosen


def _pairs(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    places = itertools.combinations(enumerate(case), 2)
    return {(first, repr(one), second, repr(two)) for (first, one), (second, two) in places}
