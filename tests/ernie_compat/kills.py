"""A training run that is killed again and again at random moments, and continued each time.

python tests/ernie_compat/kills.py --kills 15 --seed 0 DIRECTORY      one line per kill
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import processes  # noqa: E402  the paths above are needed when this is run as a program
from small_run import SIZE_OPTIONS, write_text  # noqa: E402
from worlds import ROOT, environment  # noqa: E402

from ernie_compat.checkpoint import load_checkpoint  # noqa: E402
from ernie_compat.metrics import read_metrics  # noqa: E402
from ernie_compat.saved_run import SavedRun  # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
MOST_S = 300.0


@dataclass(frozen=True)
class Kill:
    """One kill and what it left: the exit status, the steps of the checkpoint before and after."""

    number: signal.Signals
    status: int
    before: int
    after: int


class Victim:
    """One run in one directory, started anew or continued as often as needed."""

    def __init__(self, directory, framework="torch", steps=100_000):
        """`steps` is the length of the run; a short one may end before it is killed."""
        directory.mkdir(parents=True, exist_ok=True)
        self.out, self.text = directory / "run", write_text(directory / "text")
        self._framework, self._steps = framework, steps

    @property
    def checkpoint(self):
        return self.out / "checkpoint.npz"

    @property
    def saved_step(self):
        """Of the checkpoint, which has to be whole; 0 before the first."""
        if not self.checkpoint.exists():
            return 0
        header, arrays = load_checkpoint(self.checkpoint)
        assert arrays
        step = SavedRun.from_header(self.checkpoint, header).step
        # The metrics are ahead of the checkpoint, or as far; never behind.
        done = [record.step for record in read_metrics(self.out / "metrics.jsonl")]
        assert done[:step] == list(range(1, step + 1))
        return step

    def start(self, steps=None):
        """Continue it where there is a checkpoint; start it anew where there is none."""
        options = ["--steps", str(steps or self._steps)]
        if self.checkpoint.exists():
            options += ["--resume"]
        else:
            sizes = ["--framework", self._framework, "--precision", "bf16", *SIZE_OPTIONS]
            options += [*sizes, "--data", str(self.text), "--checkpoint-every", "2", "--overwrite"]
        command = ["-m", "ernie_compat.train_command", *options, "--out", str(self.out)]
        return processes.start(command, environment(), ROOT)

    def kill(self, number, rng):
        """Start it, and send the signal at a random moment: while it starts, or in some step."""
        before, metrics = self.saved_step, self.out / "metrics.jsonl"
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        process = self.start()
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 1.5))
        else:
            begun, more = time.monotonic(), before + rng.randint(1, 6)
            while process.poll() is None and time.monotonic() - begun < MOST_S:
                if metrics.exists() and metrics.read_text().count("\n") >= more:
                    break
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
        process.send_signal(number)
        _, said = process.communicate(timeout=MOST_S)
        assert "Traceback" not in said, said
        assert process.returncode in {0, -number, 128 + number}, (number, process.returncode, said)
        assert self.saved_step >= before, f"a checkpoint went back; {lines} lines before"
        return Kill(number, process.returncode, before, self.saved_step)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--framework", default="torch")
    given = parser.parse_args()
    # The learning rate depends on the length of the run, so both are planned equally long.
    steps = 20 * given.kills
    victim = Victim(given.directory, given.framework, steps)
    rng = random.Random(given.seed)
    for number in range(given.kills):
        kill = victim.kill(SIGNALS[number % len(SIGNALS)], rng)
        print(f"{kill.number.name}: status {kill.status}, step {kill.before} -> {kill.after}")
    process = victim.start()
    _, said = process.communicate(timeout=MOST_S)
    whole = Victim(given.directory / "whole", given.framework, steps)
    uninterrupted = whole.start()
    uninterrupted.communicate(timeout=MOST_S)
    assert (process.returncode, uninterrupted.returncode) == (0, 0), said
    ends = [load_checkpoint(one.checkpoint)[1] for one in (victim, whole)]
    assert all(ends[0][name].tobytes() == ends[1][name].tobytes() for name in ends[1])
    print(
        f"after {given.kills} kills the run of {steps} steps ended in the bits of an uninterrupted one"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
