"""The helpers that all tests share: one thread, pairs of values, ports of worlds of ranks that start
at the same time.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import worlds
from pairwise import pairwise
from worlds import TESTS, free_ports

SPARE = range(worlds.FIRST_PORT, worlds.FIRST_PORT + 100)


def test_every_pair_is_covered_by_few_cases() -> None:
    values = (range(4), "abc", (True, False), (None, 1.5))
    cases = pairwise(*values)
    for first, second in itertools.combinations(range(4), 2):
        covered = {(case[first], case[second]) for case in cases}
        assert covered == set(itertools.product(values[first], values[second]))
    assert len(cases) <= 14 and cases == pairwise(*values)


def test_a_port_that_another_world_was_given_is_not_given_again(monkeypatch):
    """While that world lives, though nobody listens on the port yet."""
    program = "import worlds; print(*worlds.free_ports(3), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    ) as other:  # fmt: skip
        taken = [int(port) for port in other.stdout.readline().split()]
        ours = free_ports(1)
        candidates = [*taken, *ours]
        monkeypatch.setattr(worlds.random.SystemRandom, "sample", lambda *_: [*candidates, *SPARE])
        assert free_ports(1)[0] not in candidates
        other.communicate("\n")
    monkeypatch.setattr(worlds.random.SystemRandom, "sample", lambda *_: taken)
    assert free_ports(1) == taken[:1], "it is free again when that process has ended"
