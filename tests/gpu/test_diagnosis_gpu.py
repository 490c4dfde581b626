"""`bisect` on GPU engines: their stages are what the reference engine makes of their inputs."""

from __future__ import annotations

import numpy as np
import pytest
from numerics_cases import make_case

from sonicmoe.bench.workload import Variant, available_variants
from sonicmoe.diagnostics.bisect import WGRAD_OPERANDS, bisect
from sonicmoe.diagnostics.bisect_report import text_of
from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings
from sonicmoe.enums import EngineName

pytestmark = pytest.mark.gpu
SIZES = CaseSizes(tokens=700, hidden=256, intermediate=128, experts=6, topk=3)


# Stages that never exist in memory, or that quantise nothing where nothing is quantised.
FUSED = {
    # dz and y1s themselves are the operands of wgrad.
    EngineName.HOPPER: {"dy1", "wgrad_dz", "wgrad_y1s"},
    EngineName.BF16: {"dy1", "x_read", "dout_read", "dz_read", *WGRAD_OPERANDS},
    EngineName.REFERENCE: set(),
}


def engines() -> list[Variant]:
    references = [Variant(EngineName.REFERENCE, mode) for mode in ("perf", "off")]
    return [*available_variants("cuda:0"), *references]


def make_step(fp8: bool) -> StepDump:
    case = make_case("gaussian", SIZES, seed=0)
    indices = case.indices.copy()
    indices[::3, 2], indices[1::7, 0] = -1, SIZES.experts
    arrays = (case.x, indices, case.probs, case.w1, case.w2)
    return StepDump("gpu", StepSettings(recipe="dx256" if fp8 else None), *arrays, dout=case.dout)


def test_every_engine_is_healthy():
    for variant in engines():
        report = bisect(make_step(variant.fp8), variant.engine.value, "cuda:0")
        assert report.healthy, f"{variant}: {text_of(report)}"
        assert set(report.missing) <= FUSED[variant.engine], variant
        if variant.fp8:
            named = {name for name in report.stats if name.endswith("_fp8")} | {"y1"}
            quantised = named | (set(WGRAD_OPERANDS) & set(report.stats))
            assert all(report.stats[name].saturation is not None for name in quantised), variant


def test_a_bad_token_is_named_on_every_engine():
    for variant in engines():
        step = make_step(variant.fp8)
        x = step.x.copy()
        x[123, 45] = np.nan
        fault = bisect(step.but(x=x), variant.engine.value, "cuda:0").fault
        assert (fault.stage, fault.place.token, fault.place.column) == ("x", 123, 45), variant
