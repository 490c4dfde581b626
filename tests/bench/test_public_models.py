"""The table of public models: complete, consistent with the benchmark's shapes, and served by both
GPU engines.
"""

from __future__ import annotations

import re

import pytest

from sonicmoe.bench.public_models import PUBLIC_MODELS, expert_sizes
from sonicmoe.bench.shapes import SHAPES
from sonicmoe.engine.capabilities import BF16, HOPPER, Workload, problem
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["iso128"])
MODELS = pytest.mark.parametrize("name", PUBLIC_MODELS)


def workload(model, settings, changes=(0, 0)):
    hidden, inner = (size + change for size, change in zip(model[:2], changes, strict=True))
    return Workload(settings, hidden, inner)


@pytest.mark.parametrize(
    ("record", "settings"), [(HOPPER, FP8), (BF16, EngineSettings())], ids=["fp8", "bf16"]
)
@MODELS
def test_served_by_both_gpu_engines(name, record, settings):
    assert problem(record, workload(PUBLIC_MODELS[name], settings), "sm_90a") is None


@pytest.mark.parametrize("changes", [(8, 0), (0, 32)], ids=str)
@MODELS
def test_sizes_nearby_are_refused_by_number(name, changes):
    nearby = workload(PUBLIC_MODELS[name], FP8, changes)
    words = f"H is {nearby.hidden_size} and I is {nearby.intermediate_size}"
    assert words in problem(HOPPER, nearby, "sm_90a")


@MODELS
def test_a_token_has_no_more_experts_than_there_are(name):
    model = PUBLIC_MODELS[name]
    assert min(model) >= 1 and model.topk <= model.experts


def test_distinct_sizes():
    sizes = expert_sizes()
    assert len(set(sizes.values())) == len(sizes) < len(PUBLIC_MODELS)
    assert set(sizes.values()) == {model[:2] for model in PUBLIC_MODELS.values()}
    assert all(PUBLIC_MODELS[name][:2] == found for name, found in sizes.items())


def test_the_benchmarks_shapes_agree():
    """`qwen3-235b-a22b-ep8` has an eighth of the model's experts and its H, I, K."""
    models = {name.lower(): model for name, model in PUBLIC_MODELS.items()}
    compared = 0
    for name, shape in SHAPES.items():
        base, ranks = re.fullmatch(r"(.*?)(?:-ep(\d+))?", name).groups()
        if base in models:
            model, compared = models[base], compared + 1
            whole = (shape.hidden, shape.intermediate, shape.experts * int(ranks or 1), shape.topk)
            assert whole == model, name
    assert compared >= 5
