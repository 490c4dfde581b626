"""The program for several GPUs, tried over gloo: it measures, and it fails when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

from worlds import ROOT, environment

SMOKE = ROOT / "tools" / "ci" / "multicard_smoke.py"
SIZES = "--device cpu --tokens 128 --hidden 64 --intermediate 32 --experts 4 --topk 2 --repeats 1 --steps 0".split()  # noqa: SIM905


def test_runs_over_gloo_and_reports():
    command = [sys.executable, str(SMOKE), *SIZES, "--precisions", "fp8", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=120)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["failures"] == [] and figures["skipped"] == {"deepep": "DeepEP needs GPUs"}
    (layer,) = figures["layers"]
    assert layer["dispatcher"] == "torch.distributed (gloo)" and layer["times"]["tokens_per_s"] > 0
    assert set(layer["errors"]) == {"y", "dx", "dweights", "up_gate", "down"}


def test_a_wrong_result_fails(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SMOKE.parent))
    import multicard_smoke

    monkeypatch.setattr(sys, "argv", ["multicard_smoke.py", *SIZES])
    good = {"errors": dict.fromkeys(multicard_smoke.BOUNDS, 1e-3), "finite": True}
    good |= {"poison_changes_nothing": True, "repeats_bit_identical": True}
    for spoilt in (
        {"errors": {"dx": 0.5}},
        {"errors": {"dx": float("nan")}},
        {"finite": False},
        {"poison_changes_nothing": False},
    ):
        report = multicard_smoke.Report(multicard_smoke.parse(), True)
        report.layer("nccl", "fp8", {**good, **spoilt})
        assert report.finish() == 1 and "FAILED: nccl, fp8" in capsys.readouterr().err
    report = multicard_smoke.Report(multicard_smoke.parse(), True)
    report.layer("nccl", "fp8", good)
    report.training({"ranks": 5.0, "alone": 5.0})
    assert report.finish() == 0
    report.training({"ranks": 5.1, "alone": 5.0})
    assert report.finish() == 1


def test_too_few_gpus_is_said(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SMOKE.parent))
    import multicard_smoke

    monkeypatch.setattr(multicard_smoke, "gpu_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["multicard_smoke.py"])
    assert multicard_smoke.launch(multicard_smoke.parse()) == 2
    assert "1 GPUs here, 2 needed; nothing was run" in capsys.readouterr().err
