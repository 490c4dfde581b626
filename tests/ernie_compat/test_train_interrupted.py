"""Training that is killed, that loses its terminal, that cannot say anything, or that meets another
run in its directory.
"""

from __future__ import annotations

import io
import random
import signal
import sys
import threading
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from kills import Victim
from small_run import SIZE_OPTIONS

from ernie_compat.progress import InterruptGuard
from ernie_compat.run_directory import claimed
from ernie_compat.saved_run import SavedRun
from ernie_compat.train_command import train
from sonicmoe.cli.main import main
from sonicmoe.cli.screen import progress_console


def test_a_kill_at_a_random_moment_leaves_a_run_that_continues(tmp_path):
    victim = Victim(tmp_path)
    victim.kill(signal.SIGKILL, random.Random(7))
    # `Victim` has checked checkpoint and metrics after it.
    last = victim.saved_step
    process = victim.start(steps=last + 1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert victim.saved_step == last + 1


def test_a_second_run_in_the_directory_is_refused(text, tmp_path):
    """`test_run_directory.py` has claims of two processes."""
    with claimed(tmp_path):
        arguments = ["--framework", "torch", "--data", str(text), *SIZE_OPTIONS]
        second = CliRunner().invoke(train, [*arguments, "--out", str(tmp_path)])
    (line,) = second.stderr.splitlines()
    assert second.exit_code == 2 and second.stdout == ""
    assert f"--out {tmp_path} is in use by another run" in line
    assert not (tmp_path / "checkpoint.npz").exists()


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
    assert SavedRun.read(out / "checkpoint.npz").step == 2


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
        assert not guard.requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", InterruptGuard.SIGNALS)
def test_each_signal_asks_for_a_checkpoint(number, capsys):
    handler = signal.default_int_handler
    with handled(number, handler):
        with InterruptGuard(progress_console()) as guard:
            signal.raise_signal(number)
            assert guard.requested() and guard.received == number
        assert signal.getsignal(number) == handler
    assert "stopping after this step to save a checkpoint" in capsys.readouterr().err
