"""The program for several GPUs, tried over gloo: what it checks."""

from __future__ import annotations

import json

import processes
import pytest
from worlds import ROOT, environment

SMOKE = ROOT / "benchmarks" / "multicard_smoke.py"
SIZES = {"tokens": 128, "hidden": 64, "intermediate": 32, "experts": 4, "topk": 2}
OPTIONS = ["--device=cpu", "--precision=fp8", *(f"--{n}={size}" for n, size in SIZES.items())]


def run(*more):
    """`(exit code, figures, stderr)` of a small run over gloo."""
    result = processes.run([SMOKE, *OPTIONS, "--json", *more], environment(), ROOT, timeout=240)
    return result.returncode, json.loads(result.stdout), result.stderr


@pytest.fixture(scope="module")
def checked():
    """Figures and words of a whole run: both ways that tokens travel, and both of waiting."""
    options = ["--precision=fp8-dispatch", "--hidden=256", "--no-wait"]
    code, figures, said = run("--steps", "4", *options)
    assert code == 0, said
    return figures, said


@pytest.mark.trained
def test_runs_over_gloo_and_reports(checked):
    figures, _ = checked
    assert figures["failures"] == [] and figures["skipped"] == {"deepep": "DeepEP needs GPUs"}
    for layer in figures["layers"]:
        for case in ("even", "idle_rank"):
            errors = layer[case]["errors"]
            assert set(errors) == {"y", "dx", "dweights", "up_gate", "down"} and errors["y"] > 0
    for name in ("unmoved_parameters", "differing_parameters", "failed_ranks"):
        assert figures[name] == 0
    # 1e-5 to 2.7e-5 over 6 seeds.
    assert figures["gap_to_one_process"] <= 1e-3


def test_rows_that_travel_in_fp8_beside_those_that_nobody_counts(checked):
    figures, said = checked
    layers = {(layer["dispatcher"], layer["precision"]): layer for layer in figures["layers"]}
    gloo = "torch.distributed (gloo)"
    names = (gloo, f"{gloo}, not waiting")
    assert list(layers) == [(n, precision) for precision in ("fp8", "fp8-dispatch") for n in names]
    for precision in ("fp8-dispatch", "fp8"):
        waiting, blind = (layers[name, precision] for name in names)
        assert waiting["even"] == blind["even"]
    for case in ("even", "idle_rank"):
        assert f"{gloo}, fp8, {case}: the same bits without waiting for counts" in said


def test_ranks_that_take_too_long_are_stopped_and_said():
    code, figures, said = run("--timeout=1")
    assert code == 1 and figures["failed_ranks"] == 2
    (failure,) = figures["failures"]
    assert failure.startswith("the ranks were stopped after 1 s; rank 0 in: ") and failure in said
