"""Seeds of train --compare on the devices of a host: what is planned, run, reported, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import loss_curves
import loss_gap_bench as bench
import processes
import pytest
from click.testing import CliRunner

from ernie_compat.metrics import read_metrics
from ernie_compat.train_command import train


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(processes.TESTS))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the router picks, the experts learn what the others leave\n" * 300)
    return path


def run(*arguments: object, program=bench.main):
    return CliRunner().invoke(program, [str(argument) for argument in arguments])


def test_seeds_are_run_compared_and_measured(text: Path, tmp_path: Path) -> None:
    seeds = [0, 4]
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    result = run(
        "--run", f"tiny:{','.join(map(str, seeds))}", "--steps", 3, "--device", "cpu", "--framework", "torch",
        "--data", text, "--out", out, "--json", figures,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert [one["seed"] for one in found["runs"]] == seeds and found["unfinished"] == []
    (summary,) = found["summaries"]
    signed = summary["signed_gap"]
    assert signed["low"] < signed["mean"] < signed["high"] and signed["deviation"] > 0
    inside = r"of the signed gap over 2 seeds is (not )?inside \+-0\.15 %"
    assert re.search(inside, result.output)
    assert "2 of 2 seeds finished" in result.output
    assert "its standard deviation" in result.output
    assert "fp8 on torch, engine reference, 3 steps" in result.output
    for recipe in ("dx256", "deepseek-v3"):
        assert re.search(rf"│ {recipe} +│ int8 ", found["numerics"][f"tiny seed {seeds[0]}"])
    assert f"tiny seed {seeds[0]}, step 3, layer 1" in result.output
    assert not list(out.glob("**/checkpoint.npz"))
    assert "step 3/3" in (out / "tiny-seed4.log").read_text()

    losses, plot = tmp_path / "data" / "losses.jsonl", tmp_path / "plot.png"
    for _ in range(2):  # the second time in the place of the first
        runs = [out / f"tiny-seed{seed}" for seed in seeds]
        said = run("gather", *runs, "--to", losses, program=loss_curves.main)
        assert "2 runs" in said.output
    said = run("report", losses, "--tail", 2, "--plot", plot, program=loss_curves.main)
    assert "gap of the last 2 steps" in said.output and plot.stat().st_size
    for found, seed in zip(loss_curves.read_curves(losses), seeds, strict=True):
        records = read_metrics(out / f"tiny-seed{seed}" / "metrics.jsonl")
        assert found.fp8 == pytest.approx([one.loss for one in records], abs=1e-5)
        assert found.full == pytest.approx([one.full_precision_loss for one in records], abs=1e-5)


def test_a_seed_that_fails_has_its_last_words_in_the_report(tmp_path: Path) -> None:
    result = run("--run", "tiny:3", "--device", "cpu", "--data", "/no/such/text", "--out", tmp_path)
    assert result.exit_code == 1
    assert "tiny seed 3: failed at step 0 of 8\n    sonicmoe train: no such file" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "huge:0"], "'huge' is none of the presets 420m, 1b, tiny"),
        (["--run", "tiny"], "'' are no seeds; needed: 0-7, 0,2,5 or 3"),
        (["--run", "tiny:7-0"], "has no seed"),
        (["--run", "tiny:1,0-2"], "or one of them twice"),
        (["--run", "tiny:0", "--run", "tiny:1"], "--run names a preset twice"),
        (["--run", "tiny:0", "--device", "cuda"], "there is no NVIDIA GPU here; --device cpu"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(bench, "gpus", lambda environment: [])
    device = [] if "--device" in arguments else ["--device", "cpu"]
    result = run(*arguments, *device, "--out", tmp_path / "out")
    assert result.exit_code != 0 and words in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", bench.PRESETS)
def test_the_command_of_a_seed_says_everything_that_the_preset_holds(name: str) -> None:
    preset = bench.PRESETS[name]
    seed = bench.Seed(name, 5, Path("out"))
    words = bench.train_arguments(preset, seed, "torch", "hopper", ["text"])
    given = train.make_context("train", list(words[1:])).params
    model = {name: value for name, value in given.items() if hasattr(preset.model, name)}
    assert all(getattr(preset.model, name) == value for name, value in model.items())
    assert len(model) == 7 and (given["steps"], given["batch_size"]) == (
        preset.train.steps,
        preset.train.batch_size,
    )
    assert (given["lr"], given["seed"]) == (preset.train.lr, 5)
    assert (given["checkpoint"], given["compare"], given["engine"]) == (False, True, "hopper")
    assert given["capture_layers"] == (preset.model.num_layers - 1,)
