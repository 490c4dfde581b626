"""`sonicmoe train` as a user meets it: what it prints, what it leaves behind, how it ends."""

from __future__ import annotations

import io
import json
import signal
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from numerics_cases import load_case
from small_run import SIZE_OPTIONS, write_text

from ernie_compat.checkpoint import load_checkpoint, read_header
from ernie_compat.metrics import read_metrics
from ernie_compat.model_config import node_config
from ernie_compat.progress import InterruptGuard, TrainingDisplay
from ernie_compat.train_command import train
from sonicmoe.cli.main import main
from sonicmoe.cli.screen import progress_console
from sonicmoe.diagnostics.step_dump import load_dump


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run to its end beside full precision; its last step is captured. `test_ernie_ranks.py` has
    the command under Paddle. The options that make it again, its directory, what it printed.
    """
    place = tmp_path_factory.mktemp("whole")
    options = ["--framework", "torch", "--data", str(write_text(place / "text"))]
    options += ["--steps", "30", "--lr", "0.01", "--compare", "--micro-batches", "2", *SIZE_OPTIONS]
    with warnings.catch_warnings():
        for shown in (UserWarning, RuntimeWarning, FutureWarning):
            warnings.simplefilter("error", shown)
        ended = invoke(*options, "--capture", "1", "--out", str(place / "run"))
    return SimpleNamespace(options=options, out=place / "run", result=ended)


def assert_captured(out):
    """The first of two micro-batches of the FP8 run, with the weights before its last update."""
    captured = out / "captured-step30-layer1.npz"
    case, step = load_case(captured), load_dump(captured)
    assert case.x.shape == case.dout.shape == (2 * 16, 32) and case.indices.shape == (2 * 16, 2)
    assert case.w1.shape == (4, 64, 32) and step.settings.recipe == "dx256"
    assert all(np.abs(array).max() > 0 for array in (case.x, case.dout, case.probs))
    after = load_checkpoint(out / "checkpoint.npz")[1]
    down = after["main/weight/layers.1.mlp.experts.0.down_proj.weight"].T
    assert 0 < np.abs(step.w2[0] - down).max() < 1e-2


@pytest.mark.trained
def test_compare_leaves_metrics_checkpoint_and_a_summary(whole):
    out, result = whole.out, whole.result
    assert result.exit_code == 0, result.stderr
    summary = json.loads((out / "summary.json").read_text())
    # Over 4 seeds and two instruction sets: 2.07 to 2.16 below after 25 steps, and gaps of 1e-4 to
    # 1.8e-3.
    assert summary["loss_end"] < summary["loss_start"] - 0.5
    assert 0 < summary["loss_gap"] < 0.05
    assert summary["config"]["framework"] == "torch"
    for word in ("loss at start", "loss at end", "gap to full precision"):
        assert word in result.stdout
    assert f"{100 * summary['loss_gap']:.3f} %" in result.stdout
    records = read_metrics(out / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, 31))
    for record in records:
        assert record.full_precision_loss and record.tokens_per_s > 0
        assert len(record.expert_load[0]) == 4
    assert read_header(out / "checkpoint.npz").step == 30
    assert "step 30/30" in result.stderr and "k tok/s, load " in result.stderr
    assert "(beside fp32 on reference)" in result.stdout
    told = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert all(line.endswith(" s left") for line in told[:-1]) and "left" not in told[-1]
    assert "Warning" not in result.stderr
    assert_captured(out)


def test_interrupt_saves_exits_130_and_the_resumed_run_ends_like_an_uninterrupted_one(
    whole, tmp_path, monkeypatch
):
    """And captures what it was asked for at first. `test_ernie_paddle.py` resumes a run of Paddle's."""
    out, update = tmp_path / "run", TrainingDisplay.update

    def interrupted(display, record):
        update(display, record)
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "update", interrupted)
        stopped = invoke(*whole.options, "--capture", "1", "--out", str(out))
    assert stopped.exit_code == 130 and stopped.stdout == "", stopped.output
    assert "interrupted at step 3; checkpoint saved" in stopped.stderr
    assert read_header(out / "checkpoint.npz").step == 3
    assert [record.step for record in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]

    resumed = invoke("--resume", "--out", str(out))
    assert resumed.exit_code == 0, resumed.stderr
    assert "resuming after step 3" in resumed.stderr
    ends = [load_checkpoint(path / "checkpoint.npz")[1] for path in (out, whole.out)]
    assert {name: array.tobytes() for name, array in ends[0].items()} == {
        name: array.tobytes() for name, array in ends[1].items()
    }
    records = [read_metrics(path / "metrics.jsonl") for path in (out, whole.out)]
    assert [r.loss for r in records[0]] == [r.loss for r in records[1]]
    assert_captured(out)


class Directory:
    """Small runs of PyTorch in one directory, in this process."""

    def __init__(self, text, out):
        self.text, self.out = text, out

    def start(self, *options, steps=1):
        text = [] if "--data" in options else ["--data", str(self.text)]
        given = ["--framework", "torch", *text, "--steps", str(steps), "--out", str(self.out)]
        return invoke(*given, *SIZE_OPTIONS, *options)

    def resume(self, *options):
        return invoke("--resume", "--out", str(self.out), *options)

    @property
    def saved_step(self):
        return read_header(self.out / "checkpoint.npz").step

    @property
    def files(self):
        found = (path for path in self.out.iterdir() if path.name[0] != ".")
        return {path.name: path.read_bytes() for path in found}


@pytest.fixture
def run(text, tmp_path):
    return Directory(text, tmp_path / "run")


def invoke(*arguments):
    """The command with exactly these arguments, in this process."""
    return CliRunner().invoke(train, arguments)


def assert_refused(result, *words):
    """In one line, with exit code 2."""
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == ""
    assert all(word in line for word in words), line
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "no/such/text"], "no such file or directory: no/such/text"),
        (["--data", "{file}"], "no text in"),
        (["--data", "{short}"], "sequence length 16"),
        (["--steps", "many"], "'many' is not a valid integer"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "{new}"], "no checkpoint at"),
        (["--resume", "--out", "{damaged}"], "damaged/checkpoint.npz cannot be read"),
        (["--out", "{file}"], "cannot be a directory"),
        (["--capture", "0"], "capture_layers has 0; the MoE layers of this model are 1 to 1"),
        (["--capture", "1", "--capture", "2"], "capture_layers has 2; the MoE layers"),
        (["--lr", "1e30"], "lr is 1e+30; needed: a number from 1e-12 to 1.0"),
        (["--out", ""], "'' is empty; needed: a path"),
        (["--data", "/dev/zero"], "'/dev/zero' is neither a file nor a directory"),
        (["--hidden", str(10**12)], "GiB of memory, and this machine has"),
        (["--batch", str(10**12)], "GiB of memory, and this machine has"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(text, tmp_path, arguments, words):
    places = {name: tmp_path / name for name in ("short", "new", "damaged", "file")}
    places["damaged"].mkdir()
    (places["damaged"] / "checkpoint.npz").write_text("not one")
    places["short"].write_text("too short")
    places["file"].touch()
    options = [option.format(**places) for option in arguments]
    if "--out" not in options and "--resume" not in options:
        options += ["--out", str(places["new"])]
    if "--data" not in options:
        options += ["--data", str(text)]
    framework = [] if "--resume" in options else ["--framework", "torch"]
    assert_refused(invoke(*framework, *SIZE_OPTIONS, *options), words)
    assert not places["new"].exists()  # nothing is made before everything was checked


def test_an_engine_of_the_environment_is_the_default(run, set_flags):
    set_flags(SONIC_MOE_ENGINE="bf16", SONIC_MOE_FP8_MODE="mem")
    refused = run.start()
    assert refused.exit_code == 2 and "engine 'bf16' cannot run" in refused.stderr
    assert run.start("--engine", "reference").exit_code == 0
    # Beside the engine that the checkpoint names, the environment's is not asked.
    resumed = run.resume("--steps", "2")
    assert resumed.exit_code == 0 and "reference" in resumed.output


def test_fp8_runs_in_the_mode_of_the_environment(set_flags):
    for given, mode in (("mem", "mem"), ("perf", "perf"), ("off", "perf")):
        set_flags(SONIC_MOE_FP8_MODE=given)
        assert node_config("fp8", "auto").resolve().fp8_mode == mode
        for precision in ("bf16", "fp32"):  # nor does it reach a twin
            assert node_config(precision, "auto").resolve().fp8_mode == "off"


def test_a_run_is_replaced_only_when_asked_to(run):
    assert run.start(steps=2).exit_code == 0
    (run.out / "mine.txt").touch()
    (run.out / "captured-step300-layer2.npz").touch()
    before = run.files
    for _ in range(2):
        assert_refused(run.start(), "holds a run; --resume", "--overwrite replaces it")
    assert run.resume("--overwrite").exit_code == 2 and run.files == before
    assert run.start("--overwrite").exit_code == 0
    assert {*before} - {*run.files} == {"captured-step300-layer2.npz"}
    assert run.saved_step == len(read_metrics(run.out / "metrics.jsonl")) == 1
    # A link to a disk that is away counts, and what is left of a run too.
    for name in ("checkpoint.npz", "metrics.jsonl", "summary.json"):
        (run.out / name).unlink()
    (run.out / "metrics.jsonl").symlink_to("nowhere")
    assert_refused(run.start(), "holds a run; --resume")


def test_a_run_without_a_directory_has_a_new_one(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = ["--framework", "torch", "--data", str(text), "--steps", "1", *SIZE_OPTIONS]
    assert invoke(*start).exit_code == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert (made / "checkpoint.npz").exists()


def test_a_resumed_run_finds_its_text_by_itself(run, tmp_path, monkeypatch):
    text = write_text(tmp_path / "text")
    monkeypatch.chdir(text.parent)
    assert run.start("--data", text.name).exit_code == 0
    monkeypatch.chdir("/")
    own = run.resume("--steps", "2")
    assert own.exit_code == 0 and "2 files" in own.stderr
    assert read_header(run.out / "checkpoint.npz").data == (str(text),)

    file = text / "a.txt"
    said = run.resume("--data", str(file), "--steps", "3")
    assert said.exit_code == 0 and "1 files" in said.stderr
    file.write_text("changed " * 200)
    changed = run.resume("--steps", "4")
    file.unlink()
    gone = run.resume("--steps", "4")
    for result, words in (
        (changed, f"the text in {file} is not the one"),
        (gone, f"the text of the checkpoint is gone: no such file or directory: {file}"),
    ):
        line = assert_refused(result, words)
        assert line.endswith("to continue on another text, give --data")
    assert run.saved_step == 3


def test_tensors_that_were_not_captured_are_an_exit_code(run, monkeypatch):
    monkeypatch.setattr("sonicmoe.diagnostics.capture.save_dump", lambda *_: 1 / 0)
    result = run.start("--capture", "1", steps=2)
    assert result.exit_code == 1
    missed = f"the last step's tensors are not in {run.out / 'captured-step2-layer1.npz'}"
    assert missed in result.stderr
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["captured"] == [] and run.saved_step == 2  # the run itself is whole


# Without a terminal, or without a word. test_ernie_ranks.py kills it.


class FullDisk(io.StringIO):
    refused = 0

    def write(self, text):
        self.refused += 1
        raise OSError(28, "No space left on device")


def test_progress_that_cannot_be_shown_costs_no_step(text, tmp_path, monkeypatch):
    stderr, out = FullDisk(), tmp_path / "run"
    options = ["--framework", "torch", "--precision", "bf16", "--data", str(text), "--steps", "2"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "stderr", stderr)
        main(["train", *options, *SIZE_OPTIONS, "--out", str(out)])
    assert end.value.code == 0 and stderr.refused > 1
    assert read_header(out / "checkpoint.npz").step == 2


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        *((number, signal.default_int_handler) for number in InterruptGuard.SIGNALS),
        (signal.SIGHUP, signal.SIG_IGN),  # under nohup, where a run outlives its terminal
    ],
)
def test_each_signal_asks_for_a_checkpoint(number, handler, capsys):
    before, ignored = signal.signal(number, handler), handler == signal.SIG_IGN
    try:
        with InterruptGuard(progress_console()) as guard:
            signal.raise_signal(number)
            assert guard.received == (0 if ignored else number)
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    said = "stopping after this step to save a checkpoint" in capsys.readouterr().err
    assert said is not ignored
