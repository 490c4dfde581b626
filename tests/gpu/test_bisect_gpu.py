"""`bisect` on a GPU: every engine's stages are what the reference engine makes of their inputs, and
what it makes of the step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonicmoe.bench.workload import Variant, available_variants
from sonicmoe.diagnostics.bisect import WGRAD_OPERANDS, bisect
from sonicmoe.diagnostics.bisect_report import text_of
from sonicmoe.diagnostics.cases import Sizes, make_case
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings
from sonicmoe.enums import EngineName

pytestmark = pytest.mark.gpu

SIZES = Sizes(tokens=700, hidden=512, intermediate=256, experts=6, topk=3)


# Stages that never exist in memory, or that quantise nothing where nothing is quantised.
FUSED = {
    EngineName.HOPPER: {
        "dy1",
        "wgrad_dz",
        "wgrad_y1s",
    },  # dz and y1s themselves are the operands of wgrad
    EngineName.BF16: {"dy1", "x_fp8", "dout_fp8", "dz_fp8", *WGRAD_OPERANDS},
    EngineName.REFERENCE: set(),
}


def engines() -> list[Variant]:
    if not torch.cuda.is_available():
        return []
    return [
        *available_variants("cuda:0"),
        Variant(EngineName.REFERENCE, "perf"),
        Variant(EngineName.REFERENCE, "off"),
    ]


def make_step(fp8: bool) -> StepDump:
    case = make_case("gaussian", SIZES, seed=0)
    indices = case.indices.copy()
    indices[::3, 2], indices[1::7, 0] = -1, SIZES.experts
    arrays = (case.x, indices, case.probs, case.w1, case.w2)
    return StepDump("gpu", StepSettings(recipe="dx256" if fp8 else None), *arrays, dout=case.dout)


@pytest.mark.parametrize("against", ["golden", "reference"])
def test_every_engine_is_healthy(against):
    for variant in engines():
        report = bisect(make_step(variant.fp8), variant.engine.value, against, "cuda:0")
        assert report.healthy, f"{variant}: {text_of(report)}"
        assert set(report.missing) <= FUSED[variant.engine], variant
        if variant.fp8:
            quantised = {
                name for name in report.stats if name.endswith("_fp8") or name in WGRAD_OPERANDS
            } | {"y1"}
            assert all(report.stats[name].saturation is not None for name in quantised), variant


def test_a_bad_token_is_named_on_every_engine():
    for variant in engines():
        step = make_step(variant.fp8)
        x = step.x.copy()
        x[123, 45] = np.nan
        fault = bisect(step.but(x=x), variant.engine.value, "golden", "cuda:0").fault
        assert (fault.stage, fault.place.token, fault.place.column) == ("x", 123, 45), variant
