"""The ranks of a training world, children of one process: they run every scenario and leave what they
saw in `<out>/<scenario>/`. The exit code of each is printed.

Arguments: text, directory, the variables of the ranks, the ports of the scenarios.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

from forked import run_ranks
from small_run import SIZE_OPTIONS, run_config

from ernie_compat import torch_backend
from ernie_compat.checkpoint import SavedRun, save_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.progress import TrainingDisplay
from ernie_compat.ranks import read_launch
from ernie_compat.train_command import train
from ernie_compat.trainer import MAIN, Trainer

# name: (precision, micro-batches, stop after, resume from another run's checkpoint)
SCENARIOS = {
    "plain": ("fp32", 1, 6, False),
    "micro": ("fp32", 2, 6, False),
    "fp8": ("fp8", 1, 6, False),
    "fp8 again": ("fp8", 1, 6, False),
    "half": ("fp32", 1, 3, False),
    "resumed": ("fp32", 1, 6, True),
}
# Runs of the command without end, which one rank leaves in step 4. The last of them loses the first
# rank, which holds the store of the world; tests/ep/test_ep_lost_ranks.py kills the last.
SIGNALS = {"interrupted": (1, signal.SIGINT), "killed": (0, signal.SIGKILL)}
BATCH = 8


def run_scenario(name, corpus, directory, ranks=None):
    """Train; a resumed run leaves what it has loaded."""
    precision, micro_batches, stop_after, resume = SCENARIOS[name]
    begin = Trainer.resume if resume else Trainer.start
    config = run_config(
        precision=precision, train={"batch_size": BATCH, "micro_batches": micro_batches}
    )
    trainer = begin(config, corpus, directory, ranks)
    if resume:
        loaded = trainer.learners[MAIN].state()  # a collective
        if trainer.writes:
            run = SavedRun(trainer.step, trainer.config, "")
            save_checkpoint(directory / "loaded.npz", run, loaded)
    trainer.train(should_stop=lambda: trainer.step >= stop_after)
    return trainer


def run_command(name, text, directory, rank):
    """`sonicmoe train`, of which one rank gets a signal. Leaves the exit code of each."""
    update, (victim, number) = TrainingDisplay.update, SIGNALS[name]

    def and_then(display, record):
        update(display, record)
        if record.step == 4 and rank == victim:
            os.kill(os.getpid(), number)

    options = ["--framework", "torch", "--steps", "100000", "--checkpoint-every", "3"]
    options += [*SIZE_OPTIONS, "--data", text, "--out", str(directory)]
    try:
        with mock.patch.object(TrainingDisplay, "update", and_then):
            train.main(options)
    except SystemExit as end:
        (directory / f"{rank}.code").write_text(str(end.code))


def run_rank(rank, text, directory, variables, ports):
    corpus = load_corpus([text])
    os.environ.update(variables[rank])
    for name in SCENARIOS:
        os.environ["MASTER_PORT"] = ports[name]
        ranks = torch_backend.JoinedRanks(read_launch(), 1024)
        run_scenario(name, corpus, directory / name, ranks)
        ranks.close()
    for name in SIGNALS:
        os.environ["MASTER_PORT"] = ports[name]
        run_command(name, text, directory / name, rank)


if __name__ == "__main__":
    text, directory, variables, ports = (
        sys.argv[1],
        Path(sys.argv[2]),
        *map(json.loads, sys.argv[3:]),
    )
    print(run_ranks(len(variables), lambda rank: run_rank(rank, text, directory, variables, ports)))
