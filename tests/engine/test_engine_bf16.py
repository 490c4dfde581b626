"""The BF16 engine's border, which needs no GPU: what it refuses, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from framework import torch

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gpu import Gpu
from sonicmoe.engine.interface import EngineSettings, EngineWeights
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from sonicmoe.layouts import WeightLayout, WeightSource
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

ENGINE, SETTINGS = Bf16Engine(), EngineSettings()


def weights(hidden=16, intermediate=8, dtype=torch.bfloat16, down_dtype=None):
    w1 = torch.zeros([2, 2 * intermediate, hidden], dtype=dtype)
    return w1, torch.zeros([2, hidden, intermediate], dtype=down_dtype or dtype), None, None


def test_a_recipe_is_refused():
    settings = replace(SETTINGS, recipe=next(iter(RECIPES.values())))
    with pytest.raises(
        ConfigError,
        match=r"the bf16 engine cannot compute this: FP8 is on .*, and it quantises nothing",
    ):
        ENGINE.prepare_weights(*weights(), settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_master_weights_are_rounded_once(monkeypatch, dtype):
    """From where they lie: fp32 becomes bf16, the others stay."""
    made = []
    monkeypatch.setattr(
        Bf16Engine, "prepare_weights", lambda self, *given: made.append(given) or object()
    )
    ups, downs = (
        tuple(torch.rand(shape).to(dtype) for _ in range(2)) for shape in ([16, 16], [8, 16])
    )
    source = WeightSource(ups, downs, WeightLayout(transposed=True, split_half=True))
    ENGINE.refresh(source, SETTINGS)
    w1, w2 = made[0][:2]
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    assert w1.dtype == w2.dtype == wanted
    assert bool(
        (w1[0, 1].to(torch.float32) == ups[0][:, 8].to(wanted).to(torch.float32)).all()
    )  # the first up row


@pytest.mark.parametrize(
    ("dtype", "down_dtype", "words"),
    [
        (torch.float32, None, r"w1 is float32, w2 is float32; .* one of \['bfloat16', 'float16'\]"),
        (torch.bfloat16, torch.float16, "w1 is bfloat16, w2 is float16"),
    ],
)
def test_dtypes_without_a_gemm_are_refused(dtype, down_dtype, words):
    with pytest.raises(DTypeError, match=words):
        ENGINE.prepare_weights(*weights(dtype=dtype, down_dtype=down_dtype), SETTINGS)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "words"),
    [(12, 8, "H is 12 and I is 8"), (16, 20, "H is 16 and I is 20")],
)
def test_rows_off_16_bytes_are_refused(hidden, intermediate, words):
    with pytest.raises(ShapeError, match=words):
        ENGINE.prepare_weights(*weights(hidden, intermediate), SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_host_tensors_are_refused(dtype):
    with pytest.raises(DeviceError, match="w1 is on cpu; the bf16 engine needs a GPU of sm_90a"):
        ENGINE.prepare_weights(*weights(dtype=dtype), SETTINGS)


def test_weights_that_do_not_fit_are_refused():
    w1, w2, _, _ = weights()
    with pytest.raises(ShapeError, match="silu with I=8 needs 8"):
        ENGINE.prepare_weights(w1, w2, None, None, EngineSettings(activation=ActivationType.SILU))


def test_tokens_of_another_dtype_than_the_weights_are_refused():
    w1, w2, _, _ = weights()
    prepared = EngineWeights(w1, w2, w1, w2)
    routing = build_routing(torch.zeros([3, 1], dtype=torch.int64), torch.ones([3, 1]), 2)
    with pytest.raises(DTypeError, match="x is float16; the weights are bfloat16"):
        ENGINE.forward(torch.zeros([3, 16], dtype=torch.float16), routing, prepared, SETTINGS)


@pytest.mark.parametrize(("wanted", "lent"), [(0, 132), (2, 2), (96, 96), (1000, 132)])
def test_gemms_leave_multiprocessors_to_other_kernels(wanted, lent):
    assert Gpu("sm_90a", 132).lent(EngineSettings(gemm_num_sms=wanted)) == lent
