"""Benchmarks that run where there is no GPU, or say what they need: their tables and figures."""

from __future__ import annotations

import json

import pytest

LAYERS, EXPERTS = 2, 4
HIDDEN, INNER = 64, 32  # of the tiny sizes of freed_weights_bench
WEIGHTS = LAYERS * EXPERTS * 3 * HIDDEN * INNER / 2**20
SCALES = LAYERS * EXPERTS * 2 * 4 / 2**20  # every matrix fits into one block
ACCUMULATORS = 4 * EXPERTS * 3 * 32 * 16 / 2**20  # of the tiny sizes of main_grad_bench


def test_gradients_that_live_once(run, tmp_path):
    found = tmp_path / "figures.json"
    said = run("main_grad_bench", "--check", "--rounds", "1", "--json", found)
    first, second = said.strip().split("\n\n")[1:]
    assert len(first.splitlines()) == len(second.splitlines()) == 2 + 2 * 2
    every = json.loads(found.read_text())["figures"]
    assert [each["arrangement"] for each in every] == ["own", "stacked"]
    for each in every:
        direct, step = each["auto"], each["step"]
        assert (direct["held"], step["held"]) == (0, pytest.approx(ACCUMULATORS))
        assert list(direct["steps"]) == list(step["steps"]) == ["1", "3"]
        assert min(*direct["steps"].values(), *step["steps"].values()) > 0
        assert 0 < direct["host"] < step["host"], "step() has nothing to hand over"


def test_freed_weights_are_counted(run, tmp_path):
    found = tmp_path / "f.json"
    said = run("freed_weights_bench", "--check", "--layers", LAYERS, "--json", found)
    (shape,) = json.loads(found.read_text())["figures"]
    ways = shape["ways"]
    assert len(said.strip().splitlines()) == 2 + 2 + len(ways)
    one, two = (pytest.approx(copies * (WEIGHTS + SCALES)) for copies in (1, 2))
    held = {
        name: (way["parameters"], way["forward"], way["backward"]) for name, way in ways.items()
    }
    kept = pytest.approx(2 * WEIGHTS)
    assert held == {
        "kept": (kept, two, two),
        "kept, iso_weight": (kept, one, one),
        "freed": (0, two, two),
        "freed, released": (0, two, one),
        "freed, iso_weight": (0, one, one),
    }
    assert all(way["event"] > 0 and way["step"] > 0 for way in ways.values())
