"""The table of public models: complete, consistent with the benchmark's shapes, and served by both
GPU engines.
"""

from __future__ import annotations

import re

import pytest

from sonicmoe.bench.public_models import PUBLIC_MODELS, expert_sizes
from sonicmoe.bench.shapes import SHAPES
from sonicmoe.engine import hopper
from sonicmoe.engine.hopper import hopper_unavailable
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.quack_gemm import MlpShape
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["iso128"])
MODELS = pytest.mark.parametrize("name", PUBLIC_MODELS)


@pytest.fixture
def on_a_hopper_gpu(monkeypatch):
    """Whose kernels can be had."""
    monkeypatch.setattr(hopper, "missing_tool", lambda: None)
    monkeypatch.setattr(hopper.torch.cuda, "get_device_capability", lambda *_: (9, 0))


@MODELS
def test_served_in_fp8(name, on_a_hopper_gpu):
    assert hopper_unavailable("cuda:0", FP8, sizes=PUBLIC_MODELS[name][:2]) is None


@pytest.mark.parametrize("changes", [(8, 0), (0, 32)], ids=str)
@MODELS
def test_sizes_nearby_are_refused_by_number(name, changes, on_a_hopper_gpu):
    hidden, inner = (
        size + change for size, change in zip(PUBLIC_MODELS[name][:2], changes, strict=True)
    )
    assert f"H is {hidden} and I is {inner}" in hopper_unavailable(
        "cuda:0", FP8, sizes=(hidden, inner)
    )


@MODELS
def test_served_in_bf16(name):
    model = PUBLIC_MODELS[name]
    assert MlpShape(model.hidden, model.intermediate, ActivationType.SWIGLU).problem() is None


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
