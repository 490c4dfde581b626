"""Seeds of train --compare on the devices of a host: what is planned, run, reported, and refused."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import processes
import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import loss_gap_bench as bench  # noqa: E402
import loss_gap_presets as presets  # noqa: E402
from gpu_queue import Outcome, Task  # noqa: E402

from ernie_compat.gap_runs import GapSummary, Interval  # noqa: E402
from sonicmoe.cli.train import train  # noqa: E402
from sonicmoe.diagnostics.cases import Sizes, load_case, make_case  # noqa: E402
from sonicmoe.diagnostics.step_dump import save_dump  # noqa: E402

GPU_BYTES = 139 * 2**30
# One seed has no interval, and it takes half as long.
RUNS = [("torch", [0, 4]), pytest.param("paddle", [4], marks=pytest.mark.paddle)]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(processes.TESTS))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the router picks, the experts learn what the others leave\n" * 300)
    return path


def run(*arguments: object):
    return CliRunner().invoke(bench.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("framework", "seeds"), RUNS)
def test_seeds_are_run_compared_and_measured(
    text: Path, tmp_path: Path, framework: str, seeds: list[int]
) -> None:
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    result = run(
        "--run", f"tiny:{','.join(map(str, seeds))}", "--steps", 3, "--device", "cpu", "--framework", framework,
        "--data", text, "--out", out, "--json", figures,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert [one["seed"] for one in found["runs"]] == seeds and found["unfinished"] == []
    (summary,) = found["summaries"]
    signed = summary["signed_gap"]
    if len(seeds) > 1:
        assert signed["low"] < signed["mean"] < signed["high"] and signed["deviation"] > 0
        inside = r"of the signed gap over 2 seeds is (not )?inside \+-0\.15 %"
        assert re.search(inside, result.output)
    count = len(seeds)
    assert f"{count} of {count} seeds finished" in result.output
    assert "its standard deviation" in result.output
    assert f"fp8 on {framework}, engine reference, 3 steps" in result.output
    for recipe in ("dx256", "deepseek-v3"):
        assert re.search(rf"│ {recipe} +│ int8 ", found["numerics"][f"tiny seed {seeds[0]}"])
    assert f"tiny seed {seeds[0]}, step 3, layer 1" in result.output
    assert not list(out.glob("**/checkpoint.npz"))
    assert "step 3/3" in (out / "tiny-seed4.log").read_text()


def test_what_did_not_finish_is_listed_and_left_out(text: Path, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--data", text, "--out", tmp_path / "out", "--per-gpu", 1]
    result = run("--run", "tiny:0-1", "--steps", 10**6, "--minutes", 0.05, *arguments)
    assert result.exit_code == 1
    assert "0 of 2 seeds finished" in result.output
    assert re.search(r"tiny seed 0: stopped at step \d+ of 1000000", result.output)
    assert "tiny seed 1: not started at step 0 of 1000000" in result.output
    assert "none were measured" in result.output
    refused = run("--run", "tiny:0-1", *arguments)
    assert refused.exit_code == 1 and "tiny-seed0 is there; give another --out" in refused.output


def test_a_seed_that_fails_has_its_last_words_in_the_report(tmp_path: Path) -> None:
    result = run("--run", "tiny:3", "--device", "cpu", "--data", "/no/such/text", "--out", tmp_path)
    assert result.exit_code == 1
    assert "tiny seed 3: failed at step 0 of 8\n    sonicmoe train: no such file" in result.output


def test_the_gap_of_a_stopped_run_is_told_but_not_counted(tmp_path: Path) -> None:
    seed = bench.Seed("tiny", 0, tmp_path)
    lines = [
        json.dumps(
            dict.fromkeys(("aux_loss", "z_loss", "grad_norm", "learning_rate", "tokens_per_s"), 1.0)
            | {"step": step, "loss": 1.01, "seconds": 1.0, "load_imbalance": 1.0}
            | {"expert_load": [[1.0]], "full_precision_loss": 1.0, "full_precision_seconds": 1.0}
        )
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    stopped = Outcome(Task(seed.name, (), tmp_path / "log"), "stopped", 9.0, 143)
    (line,) = bench.unfinished_lines([stopped], {seed.name: seed}, bench.PRESETS)
    assert line == "tiny seed 0: stopped at step 2 of 8, signed gap so far 1.000 %"


def test_a_run_that_cannot_be_read_is_missing_and_not_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(Task("tiny seed 0", (), tmp_path / "log"), "finished", 1.0, 0)
    monkeypatch.setattr(bench.GpuQueue, "run", lambda *_: [outcome])
    figures = tmp_path / "new" / "figures.json"
    result = run("--run", "tiny:0", "--device", "cpu", "--out", tmp_path / "o", "--json", figures)
    assert result.exit_code == 1 and "holds no finished run: summary.json" in result.output
    found = json.loads(figures.read_text())
    assert "summary.json is missing" in found["unfinished"][0] and found["numerics"] == {}
    assert "tiny seed 0: there are no captured calls in" in result.output


def test_captured_calls_are_cut_to_rows_and_tables_to_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SAMPLED_ROWS", 8)
    seeds = [bench.Seed("tiny", number, tmp_path / f"tiny-seed{number}") for number in (0, 1)]
    for seed in seeds:
        seed.out.mkdir()
    case = make_case("gaussian", Sizes(16, 32, 32, 4, 2), 0)
    save_dump(seeds[0].out / "captured-step9-layer1.npz", case)
    (seeds[1].out / "captured-step9-layer1.npz").write_text("none")
    (path,) = bench.sampled(seeds[0], 9)
    few = load_case(path)
    assert few.name == "tiny seed 0, step 9, layer 1" and few.x.shape == (4, 32)
    assert (few.dout == case.dout[:4]).all() and (few.w1 == case.w1).all()
    assert bench.tensor_tables(seeds, "torch", bench.with_package(os.environ), 0.1) == {}
    said = capsys.readouterr().err
    assert "tiny seed 1: its captured calls cannot be read" in said
    assert "tiny seed 0: sonicmoe numerics was stopped after 0 s" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "huge:0"], "'huge' is none of the presets small, billion, tiny"),
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


def test_the_presets_fit_their_machines() -> None:
    small, billion = bench.PRESETS["small"], bench.PRESETS["billion"]
    assert (small.train.steps, billion.train.steps) == (3000, 1000)
    assert presets.parameters(billion.model) >= 1e9 and billion.alone
    assert presets.parameters(presets.MEASURED) == pytest.approx(420e6, rel=0.01)
    # Twice the expected time, and a minute to start.
    assert 2 * 8 * presets.expected_seconds(small) / 2 + 60 < 450
    assert 2 * presets.expected_seconds(billion) + 60 < 450
    assert 2 * presets.state_bytes(small) < presets.state_bytes(billion) < GPU_BYTES / 2
    # The estimate gives back what it was made from.
    same = presets.Preset(presets.MEASURED, presets.TrainConfig(steps=1, batch_size=32))
    assert presets.expected_seconds(same) == pytest.approx(presets.MEASURED_S)
    said = bench.__doc__ or ""
    assert f"{presets.flops_per_token(small.model) / 1e9:.2f} GFLOP per token" in said
    assert f"{presets.flops_per_token(billion.model) / 1e9:.2f} GFLOP per token" in said
    assert f"{presets.parameters(small.model) / 1e6:.0f} M parameters" in said


@pytest.mark.parametrize("name", bench.PRESETS)
def test_the_command_of_a_seed_says_everything_that_the_preset_holds(name: str) -> None:
    preset = bench.PRESETS[name]
    seed = bench.Seed(name, 5, Path("out"))
    words = bench.train_arguments(preset, seed, "torch", "hopper", ["text"])
    given = train.make_context("train", list(words[1:])).params
    model = {field: given[option] for option, field in bench.MODEL_OPTIONS.items()}
    assert all(getattr(preset.model, field) == value for field, value in model.items())
    assert (given["steps"], given["batch"]) == (preset.train.steps, preset.train.batch_size)
    assert (given["lr"], given["seed"]) == (preset.train.lr, 5)
    assert (given["checkpoint"], given["compare"], given["engine"]) == (False, True, "hopper")
    assert given["capture_layers"] == (preset.model.num_layers - 1,)


def test_the_goal_is_for_the_whole_interval() -> None:
    def line(low: float, high: float, runs: int = 8) -> str:
        signed = Interval((low + high) / 2, low, high, 0.001)
        return bench.goal_line(GapSummary("fp8", runs, signed, 0.001, signed, None), 0.15)

    assert "is inside +-0.15 %" in line(-0.0014, 0.0015)
    assert "is not inside +-0.15 %" in line(-0.0014, 0.0016)
    assert "is not inside" in line(-0.0016, 0.0)
    assert "has no interval" in line(float("nan"), float("nan"), runs=1)


def test_each_gpu_gets_its_processes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {}

    class Queue:
        def __init__(self, tasks, devices, slots, environment, say) -> None:
            made.update(tasks=tasks, devices=devices, slots=slots)
            made["environment"] = dict(environment)

        def run(self, deadline, asked_to_stop, on_wait):
            return [Outcome(task, "not started") for task in made["tasks"]]

    monkeypatch.setattr(bench, "GpuQueue", Queue)
    monkeypatch.setattr(bench, "gpus", lambda environment: ["0", "1"])
    monkeypatch.delenv("OMP_NUM_THREADS")
    result = run(
        "--run", "small:0-7", "--run", "billion:0", "--per-gpu", 3, "--out", tmp_path / "o"
    )
    assert result.exit_code == 1 and "0 of 9 seeds finished" in result.output
    assert made["devices"] == ["0", "1"] and made["slots"] == 3
    assert made["environment"]["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 6))
    assert [task.alone for task in made["tasks"]] == [False] * 8 + [True]
    assert all("hopper" in task.arguments for task in made["tasks"])
    assert "1,159,0" in result.output and "steps of 8,192 tokens" in result.output
