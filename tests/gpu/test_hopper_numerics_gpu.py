"""The Hopper engine's five tensors against fp64, beside the DeepSeek-V3 recipe on the same inputs.

The promise: "Every tensor (out, dx, ds, dw1, dw2), against an fp64 golden, per expert as well as
overall, on Gaussian, heavy-tailed, row-spread and outlier-channel data, is at least as exact as the
DeepSeek-V3 recipe (1x128 everywhere, FP8 `z`), computed in the same test. Our bars on [Gaussian]
data [at H=1024 I=512]: out <= 6.6 %, dx, ds, dw1, dw2 <= 6.9 %, cosine >= 0.9975."

docs/numerics.md says how it is measured and what of it a finite sample can show: a figure counts as
beyond its bar where it is so by two of its own standard errors, and an expert's share of a tensor
may have 3 % more error than under the other recipe. A whole tensor gets no such allowance here, but
for what arithmetic other than the emulation's may move.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu import engine_cases
from gpu.device import compiled_beforehand
from numerics_cases import DATA_KINDS, make_case
from numerics_scores import BARRED_DATA, BASELINE, RESOLUTION, RMSE_BARS, judge, score

from sonicmoe import SonicMoEConfig
from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.golden_stages import TENSORS, golden_tensors
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings

pytestmark = pytest.mark.gpu

FEW, MANY = (
    CaseSizes(),
    CaseSizes(tokens=16384, topk=4),
)  # H=1024 I=512 E=8; the second has 16 times the slots
# Sums of a tensor core, and bf16 before FP8, are errors of 1e-3 beside 6e-2, which adds squares:
# 1e-4 of the ratio.
ARITHMETIC = 5e-3


CONFIG = SonicMoEConfig(fp8_mode="perf", engine="hopper")
compiled = compiled_beforehand((CONFIG, (FEW.experts, FEW.hidden, FEW.intermediate)))


def on_device(case):
    """The operands of a numpy case; its values are bf16's already."""

    def tensor(name, dtype):
        return torch.tensor(getattr(case, name), dtype=dtype, device=engine_cases.DEVICE)

    x, dout, w1, w2 = (tensor(name, torch.bfloat16) for name in ("x", "dout", "w1", "w2"))
    indices, probs = tensor("indices", torch.int64), tensor("probs", torch.float32)
    return engine_cases.Case(x, dout, indices, probs, (w1, w2, None, None))


def computed(case, engine, settings):
    """fp64 on the host, under the names of `TENSORS`."""
    arrays = {
        "ds" if name == "dprobs" else name: tensor.double().cpu().numpy()
        for name, tensor in engine_cases.run(case, engine, settings).items()
    }
    assert set(arrays) == set(TENSORS)
    return arrays


OURS = HopperEngine(), engine_cases.FP8
# The emulated DeepSeek-V3 recipe with an FP8 `z`.
THEIRS = engine_cases.REFERENCE, EngineSettings(recipe=BASELINE.recipe, save_z=BASELINE.z)


def scores_of(case, found, baseline, wanted):
    return {name: score(name, case, found[name], baseline[name], wanted[name]) for name in TENSORS}


def table(scores):
    """One line per tensor, for the message of a failure."""
    return "\n".join(
        f"{name}: {one.overall.rmse:.2%} ({one.worst_rmse:.2%} in the worst expert), "
        f"{one.overall.ratio:.4f} +- {one.overall.ratio_error:.4f} of the other recipe"
        for name, one in scores.items()
    )


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [*((kind, FEW) for kind in DATA_KINDS), (BARRED_DATA, MANY)],
    ids=lambda value: getattr(value, "tokens", value),
)
def test_at_least_as_exact_as_the_deepseek_v3_recipe(kind, sizes):
    case = make_case(kind, sizes, seed=0)
    operands = on_device(case)
    ours, theirs = computed(operands, *OURS), computed(operands, *THEIRS)
    wanted = golden_tensors(case)
    scores = scores_of(case, ours, theirs, wanted)
    failures, unresolved = judge(kind, scores)
    assert not failures, f"{failures}\n{table(scores)}"
    for name, one in scores.items():
        assert one.overall.ratio <= 1 + RESOLUTION * one.overall.ratio_error + ARITHMETIC, (
            f"{name}\n{table(scores)}"
        )
        assert len(one.experts) == sizes.experts
    if kind == BARRED_DATA and sizes is MANY:
        assert not unresolved, f"{unresolved}\n{table(scores)}"
        missed = judge(kind, scores_of(case, theirs, theirs, wanted))[0]
        assert {failure.split()[0] for failure in missed} >= {"dx", "ds", "dw1", "dw2"}, (
            "the bars let E4M3 z pass"
        )


def test_error_is_that_of_quantisation():
    """Far below any E4M3 recipe's error, something was not quantised, and the comparison above
    would say nothing of FP8.
    """
    case = make_case(BARRED_DATA, FEW, seed=1)
    ours, wanted = computed(on_device(case), *OURS), golden_tensors(case)
    for name, bar in RMSE_BARS.items():
        error = np.linalg.norm(ours[name] - wanted[name]) / np.linalg.norm(wanted[name])
        assert 0.8 * bar <= error <= bar, (name, error)
