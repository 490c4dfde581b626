"""Diagnosis on GPU engines: eager and compiled calls of `MoE` are observed, names are the model's, a
CUDA graph is captured as ever where nobody observes; and `bisect`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonicmoe import MoE
from sonicmoe.bench.workload import Variant, available_variants
from sonicmoe.diagnostics.bisect import WGRAD_OPERANDS, bisect
from sonicmoe.diagnostics.bisect_report import text_of
from sonicmoe.diagnostics.cases import CaseSizes, make_case
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings
from sonicmoe.enums import EngineName

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize(
    ("use_fp8", "bias"),
    [(False, False), (False, True), (True, False)],
    ids=["bf16", "bf16, biases", "fp8"],
)


class Model(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            MoE(8, 2, 256, 128, add_bias=bias, std=0.1) for _ in range(2)
        )

    def forward(self, x, **options):
        for layer in self.layers:
            x = x + layer(x, **options)[0]
        return x


def model(bias: bool) -> Model:
    made = Model(bias).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made


def tokens() -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(4, 100, 256, generator=make).to("cuda", torch.bfloat16).requires_grad_()


@MODES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_is_named_as_the_model_names_it(use_fp8, bias, compiled):
    torch._dynamo.reset()
    made = model(bias)
    with torch.no_grad():
        made.layers[1].c_fc.weight[5, 7, 3] = float("nan")
    run = torch.compile(made) if compiled else made
    with pytest.raises(NonFiniteError) as caught, detect_nonfinite():
        run(tokens(), use_fp8=use_fp8)
    line = str(caught.value).splitlines()[1]
    assert line.startswith(
        "first bad: input w1 = layers.1.c_fc.weight at expert 5, row 7, column 3: nan"
    )


# ---- bisect: every engine's stages are what the reference engine makes of their inputs ----

SIZES = CaseSizes(tokens=700, hidden=512, intermediate=256, experts=6, topk=3)


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
