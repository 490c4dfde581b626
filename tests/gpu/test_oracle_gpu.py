"""The cases of tests/oracle on the engines of a GPU: within the bars of the golden, and the laws of bits."""

from __future__ import annotations

from functools import cache, partial

import pytest
from oracle.case import Case, covering
from oracle.faces import normal
from oracle.test_laws import problems

pytestmark = pytest.mark.gpu
PARTS = 40


@cache
def covering_set(engine: str) -> list[Case]:
    return covering(partial(normal, engine=engine))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ["hopper", "bf16", "triton"])
def test_every_pair_of_values(engine, part):
    cases = covering_set(engine)[part::PARTS]
    wrong = [f"{case}: {words}" for case in cases for words in problems(case, engine)]
    assert not wrong, "\n".join(wrong)
