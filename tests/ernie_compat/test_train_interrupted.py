"""Training that is killed, that loses its terminal, or that cannot say anything."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from contextlib import contextmanager

import processes
import pytest
from click.testing import CliRunner
from small_run import SIZE_OPTIONS
from worlds import ROOT, environment

from ernie_compat.checkpoint import load_checkpoint, read_header
from ernie_compat.metrics import read_metrics
from ernie_compat.progress import InterruptGuard
from ernie_compat.train_command import train
from sonicmoe.cli.main import main
from sonicmoe.cli.screen import progress_console


def lines_of(metrics):
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_a_kill_leaves_a_run_that_continues(text, tmp_path):
    out, begun = tmp_path / "run", time.monotonic()
    command = ["-m", "ernie_compat.train_command", "--out", str(out)]
    sizes = ["--framework", "torch", "--precision", "bf16", *SIZE_OPTIONS, "--data", str(text)]
    start = [*command, *sizes, "--steps", "100000", "--checkpoint-every", "2"]
    process = processes.start(start, environment(), ROOT)
    while lines_of(out / "metrics.jsonl") < 5:
        assert process.poll() is None and time.monotonic() - begun < 300
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    step = load_checkpoint(out / "checkpoint.npz")[0].step
    # The metrics are ahead of the checkpoint, or as far; never behind.
    done = [record.step for record in read_metrics(out / "metrics.jsonl")]
    assert step >= 4 and done[:step] == list(range(1, step + 1))
    again = CliRunner().invoke(train, ["--resume", "--steps", str(step + 1), "--out", str(out)])
    assert again.exit_code == 0 and read_header(out / "checkpoint.npz").step == step + 1
    done = [record.step for record in read_metrics(out / "metrics.jsonl")]
    assert done == list(range(1, step + 2)), "steps after the checkpoint are not kept twice"


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


@contextmanager
def handled(number, handler):
    """The tests themselves may run under nohup, which has the signal of a lost terminal ignored."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_run_under_nohup_outlives_its_terminal():
    assert threading.current_thread() is threading.main_thread()
    with handled(signal.SIGHUP, signal.SIG_IGN), InterruptGuard(progress_console()) as guard:
        signal.raise_signal(signal.SIGHUP)
        assert not guard.received
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", InterruptGuard.SIGNALS)
def test_each_signal_asks_for_a_checkpoint(number, capsys):
    handler = signal.default_int_handler
    with handled(number, handler):
        with InterruptGuard(progress_console()) as guard:
            signal.raise_signal(number)
            assert guard.received == number
        assert signal.getsignal(number) == handler
    assert "stopping after this step to save a checkpoint" in capsys.readouterr().err
