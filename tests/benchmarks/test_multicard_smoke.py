"""The program for several GPUs, tried over gloo: what it checks."""

from __future__ import annotations

import json

import multicard_smoke
import pytest
from click.testing import CliRunner

SIZES = {"tokens": 128, "hidden": 64, "intermediate": 32, "experts": 4, "topk": 2}
OPTIONS = ["--device=cpu", "--precision=fp8", *(f"--{n}={size}" for n, size in SIZES.items())]
GLOO = "torch.distributed (gloo)"


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """`run(*options)`: exit code, figures and words on stderr of a small run over gloo."""
    for name in ("CUDA_VISIBLE_DEVICES", "SONIC_MOE_CACHE_DIR", "SONIC_MOE_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # the program sets those of its ranks

    def ran(*options):
        result = CliRunner().invoke(multicard_smoke.main, [*OPTIONS, "--json", *options])
        said = result.stderr + capfd.readouterr().err  # of this process and of the ranks
        return result.exit_code, json.loads(result.stdout), said

    return ran


@pytest.mark.trained
def test_runs_over_gloo_and_reports(run):
    """Tokens travel in both ways, and the host waits or does not."""
    options = ["--precision=fp8-dispatch", "--hidden=256", "--no-wait"]
    code, figures, said = run("--steps", "4", *options)
    assert code == 0, said
    assert figures["failures"] == [] and figures["skipped"] == {"deepep": "DeepEP needs GPUs"}
    for layer in figures["layers"]:
        for case in ("even", "idle_rank"):
            errors = layer[case]["errors"]
            assert set(errors) == {"y", "dx", "dweights", "up_gate", "down"} and errors["y"] > 0
    for name in ("unmoved_parameters", "differing_parameters", "failed_ranks"):
        assert figures[name] == 0
    # 1e-5 to 2.7e-5 over 6 seeds.
    assert figures["gap_to_one_process"] <= 1e-3
    layers = {(layer["dispatcher"], layer["precision"]): layer for layer in figures["layers"]}
    names = (GLOO, f"{GLOO}, not waiting")
    assert list(layers) == [(n, precision) for precision in ("fp8", "fp8-dispatch") for n in names]
    for precision in ("fp8-dispatch", "fp8"):
        waiting, blind = (layers[name, precision] for name in names)
        assert waiting["even"] == blind["even"]
    for case in ("even", "idle_rank"):
        assert f"{GLOO}, fp8, {case}: the same bits without waiting for counts" in said


def test_ranks_that_take_too_long_are_stopped_and_said(run):
    code, figures, said = run("--timeout=0")
    assert code == 1 and figures["failed_ranks"] == 2
    (failure,) = figures["failures"]
    assert failure.startswith("the ranks were stopped after 0 s; rank 0 in: ") and failure in said
