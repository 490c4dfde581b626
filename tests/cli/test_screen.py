"""What commands say while somebody waits."""

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from sonicmoe import frameworks
from sonicmoe.cli import screen
from sonicmoe.cli.main import main
from sonicmoe.cli.screen import Activity

SMALL = {
    "train": f"--data {__file__} --steps 2 --layers 2 --hidden 16 --heads 2 --experts 2 --topk 1 "
    "--intermediate 16 --seq-len 8 --batch 2 --precision fp32",
    "bench": "--engine reference --T 16 --H 16 --I 16 --E 2 --K 1",
    "doctor": "",
}
SO_FAR = r": (\d+ of \d+, )?(about \d+ s left, )?\d+ s so far"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(screen, "PATIENCE_S", 0.02)


def work(steps):
    with Activity("bench") as doing:
        doing.begin("measuring", total=steps)
        for name in range(steps):
            doing.at(f"case {name}")
            time.sleep(0.05)
            doing.advance()


def test_work_that_ends_soon_says_nothing(capsys):
    work(1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("variable", [None, "FORCE_COLOR", "TTY_COMPATIBLE"])
def test_in_a_pipe_lines_without_control_characters(capsys, monkeypatch, variable):
    """rich takes a pipe for a terminal where FORCE_COLOR is set, as build machines have it."""
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    work(4)
    out, err = capsys.readouterr()
    *lines, last = err.splitlines()
    assert out == "" and err.isascii() and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", err)
    assert len(lines) >= 4 and all(re.fullmatch("measuring( case .)?" + SO_FAR, x) for x in lines)
    assert re.search(r"^measuring case 3: 3 of 4, about 0 s left, 0 s so far$", err, re.MULTILINE)
    assert re.fullmatch(r"bench took \d s", last)


@pytest.mark.usefixtures("impatient")
def test_a_failure_ends_the_lines_and_tells_no_duration(capsys):
    with pytest.raises(ValueError, match="bad"), Activity("bench"):
        time.sleep(0.1)
        raise ValueError("bad")
    said = capsys.readouterr().err
    time.sleep(0.1)
    assert "took" not in said and capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", ["stream", "descriptor"])
def test_a_stderr_that_cannot_be_written_costs_nothing(closed, monkeypatch, tmp_path):
    path = Path("/dev/full") if closed == "descriptor" else tmp_path / "x"
    stream = path.open("w")
    if closed == "stream":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(screen, "PATIENCE_S", 0.02)
    work(2)
    monkeypatch.setattr(sys, "stderr", None)  # a process that was started without it
    work(2)


@pytest.mark.parametrize("command", SMALL)
def test_every_command_says_what_it_is_at_and_stdout_holds_the_result(
    command, tmp_path, monkeypatch
):
    """And which framework it took, where both are installed."""
    for name in ("screen", "doctor"):
        monkeypatch.setattr(f"sonicmoe.cli.{name}.PATIENCE_S", 0.003)
    for name in ("SONIC_MOE_CACHE_DIR", "SONIC_MOE_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(frameworks, "_bound", lambda: None)  # as in a new process
    done = CliRunner().invoke(main, [command, *SMALL[command].split(), "--json"])
    assert done.exit_code == 0, done.stderr
    found, stderr = json.loads(done.stdout), done.stderr
    assert isinstance(found, dict)
    assert "\x1b" not in stderr and "\r" not in stderr
    assert re.search(f"^.*{SO_FAR}$", stderr, re.MULTILINE)
    name = {"train": "importing torch and building the model"}.get(command, command)
    assert re.search(rf"^{name} took \d+ s$", stderr, re.MULTILINE)
    choice = frameworks.choose()
    if choice.other is None or command == "bench":  # which measures with PyTorch alone
        return
    assert choice.name == "torch", "on this machine the rule picks PyTorch"
    words = "both are installed; --framework paddle takes the other"
    if command == "doctor":
        assert (found["framework"], found["framework_reason"]) == ("torch", words)
    else:
        assert f"framework: torch ({words})\n" in stderr


def test_time_left_is_that_of_the_rest(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    doing = Activity("bench")
    doing.begin("compiling", total=4)
    now[0] += 60
    assert doing._stage.line(60) == "compiling: 0 of 4, 1 min 0 s so far"
    doing.advance()
    assert doing._stage.line(60) == "compiling: 1 of 4, about 3 min 0 s left, 1 min 0 s so far"


@pytest.mark.parametrize("terminal", [False, True])
def test_only_on_a_terminal_lines_break_and_then_between_words(terminal):
    stream = io.StringIO()
    console = screen.WordConsole(file=stream, width=80, force_terminal=terminal, no_color=True)
    line = "engine reference on cpu: " + ", ".join(["not hopper: tokens are float32"] * 5)
    console.print(line)
    said = stream.getvalue().splitlines()
    assert " ".join(each.strip() for each in said) == line
    assert (len(said) > 1 and max(map(len, said)) <= 80) == terminal


def test_a_step_of_a_comparison_fits_80_columns(capsys):
    from ernie_compat.metrics import StepRecord
    from ernie_compat.progress import TrainingDisplay

    figures = (5.54512, 0.0, 0.0, 1.0, 1e-3, 123456.0, 1.1, [[0.8, 0.1, 0.1, 0.0]], 5.54321, 1.25)
    TrainingDisplay(screen.progress_console(), 3000).update(StepRecord(1500, *figures))
    (line,) = capsys.readouterr().err.splitlines()
    told = "step 1500/3000 loss 5.5451 (full 5.5432), 123.5k tok/s, load 3.2x, 3525 s left"
    assert line == told and len(told) <= 80


def test_training_prints_a_line_of_every_slow_step(capsys, monkeypatch):
    from ernie_compat import progress
    from ernie_compat.metrics import StepRecord

    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    display = progress.TrainingDisplay(screen.progress_console(), total_steps=1000)
    for step, wait in ((1, 0.0), (2, 0.0), (3, 0.1), (4, 0.0)):
        time.sleep(wait)
        record = StepRecord(step, 1.0, 0.0, 0.0, 1.0, 1e-3, 10.0, 1.0, [[0.5, 0.5]])
        display.update(record)
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines == ["1/1000", "3/1000"]
