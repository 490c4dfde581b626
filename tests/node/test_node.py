"""Nothing is computed of what is frozen, at any face. The numbers are the oracle's."""

from __future__ import annotations

import pytest
from oracle.case import Case
from oracle.faces import FACES, normal, run
from oracle.golden import scene_of
from oracle.laws import beyond_the_bars
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine


def test_adapters_of_frozen_weights_run_no_product_of_their_gradients(monkeypatch):
    monkeypatch.delattr(ReferenceEngine, "backward_dw")
    case = Case(adapters="both", trains="biases", arrangement="fused")
    scene = scene_of(case)
    assert beyond_the_bars(case, scene, run(case, scene)) == []


@pytest.mark.parametrize(
    ("trains", "line"),
    pairwise(["b1", "b2", "biases", "weights"], [
        f"face={face} {fp8}" for face in ("node", "stacked", "sorted", "moe", "transformers") if face in FACES
        for fp8 in ("", "recipe=dx256", "recipe=dx256 fp8_wgrad=False stagewise_memory=True")
    ]),
)  # fmt: skip
def test_only_what_trains_is_computed(trains, line, monkeypatch):
    """The oracle has the bits of what is."""
    calls = []
    for name in ("bias_gradients", "backward_dw"):
        original = getattr(ReferenceEngine, name)

        def noted(self, *given, name=name, original=original):
            calls.append(name)
            return original(self, *given)

        monkeypatch.setattr(ReferenceEngine, name, noted)
    case = normal(Case.parse(f"{line} bias=True trains={trains}"))
    run(case, scene_of(case))
    assert calls == ["backward_dw" if trains == "weights" else "bias_gradients"]
