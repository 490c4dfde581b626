"""`bisect` of steps in the recipe `row128`, whose weight gradients read the codes of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch
from planted import make_step, plant, row_of

from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.bisect_report import text_of
from sonicmoe.diagnostics.cases import DATA_KINDS
from sonicmoe.observe import listening
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import dequantize, quantize

ROW128 = {"recipe": "row128"}
FOLDED = ("wgrad_dout", "wgrad_y1s", "wgrad_x", "wgrad_dz")


def arrived(step):
    """The step with x and dout as they arrive in FP8, one scale per row and 128 columns."""
    fields = {}
    for name in ("x", "dout"):
        q = quantize(tensor(getattr(step, name)), rows(128))
        fields[name] = numpy(dequantize(q)).astype(np.float32)
        fields[f"{name}_codes"] = numpy(q.codes.view(torch.uint8)).astype(np.uint8)
        fields[f"{name}_scale"] = numpy(q.scale_inv).astype(np.float32)
    return step.but(**fields)


@pytest.mark.parametrize(
    ("kind", "fp8_tokens"),
    [*((kind, False) for kind in DATA_KINDS), ("gaussian", True), ("outliers", True)],
)
def test_healthy_steps_are_called_healthy(kind, fp8_tokens):
    step = make_step(kind, **ROW128)
    report = bisect(arrived(step) if fp8_tokens else step, "reference")
    assert report.healthy and report.missing == FOLDED, text_of(report)


def test_the_other_recipe_with_such_scales():
    report = bisect(make_step("outliers", recipe="row128-dx256"), "reference")
    assert report.healthy, text_of(report)
    assert report.missing == FOLDED


@pytest.mark.parametrize("where", ["x", "dout"])
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
def test_one_bad_element_of_a_token_is_named_though_all_of_dw1_is_nan(where, value):
    step = make_step(**ROW128)
    _, token, _ = row_of(step)
    bad = getattr(step, where).copy()
    bad[token, 7] = value
    report = bisect(step.but(**{where: bad}), "reference")
    assert (report.fault.stage, report.fault.place.token, report.fault.place.column) == (
        where,
        token,
        7,
    )
    assert 2 in report.fault.place.experts and "dw1" in report.wrong
    assert report.stats["dw1"].nan >= step.w1[2].size


@pytest.mark.parametrize("fp8_tokens", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("stage", ["dw1", "dw2", "dz", "y1s"])
def test_a_fault_of_weight_gradients_is_named(stage, fp8_tokens):
    step = make_step(**ROW128)
    step = arrived(step) if fp8_tokens else step
    row, *_ = row_of(step)
    with listening(plant(stage, "scaled", (2, 9, 4) if stage in ("dw1", "dw2") else (row, 5))):
        report = bisect(step, "reference")
    assert (report.fault.stage, report.fault.place.expert) == (stage, 2)
    assert report.wrong == (stage,), "a stage that is right on wrong inputs is right"
