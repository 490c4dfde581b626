"""One rank of a training world: runs the scenarios named on the command line and leaves what it saw
in `<out>/<scenario>/`.

Arguments: framework, text, directory, then `scenario=port` for each scenario in turn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from small_run import run_config

from ernie_compat.checkpoint import SavedRun, save_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.ranks import read_launch
from ernie_compat.trainer import MAIN, Trainer, backend

# name: (precision, micro-batches, stop after, resume from another run's checkpoint)
SCENARIOS = {
    "plain": ("fp32", 1, 6, False),
    "micro": ("fp32", 2, 6, False),
    "fp8": ("fp8", 1, 6, False),
    "fp8 again": ("fp8", 1, 6, False),
    "half": ("fp32", 1, 3, False),
    "resumed": ("fp32", 1, 6, True),
}
BATCH = 8


def scenario_config(name, framework="torch"):
    """The run's settings, on any number of ranks."""
    precision, micro_batches, _, _ = SCENARIOS[name]
    return run_config(
        framework=framework,
        precision=precision,
        train={"batch_size": BATCH, "micro_batches": micro_batches},
    )


def run_scenario(name, framework, corpus, directory, ranks=None):
    """Train; a resumed run leaves what it has loaded."""
    *_, stop_after, resume = SCENARIOS[name]
    begin = Trainer.resume if resume else Trainer.start
    trainer = begin(scenario_config(name, framework), corpus, directory, ranks)
    if resume:
        write(directory / "loaded.npz", trainer.learners[MAIN].state(), trainer)
    trainer.train(should_stop=lambda: trainer.step >= stop_after)
    return trainer


def write(path, arrays, trainer):
    if trainer.writes:
        save_checkpoint(path, SavedRun(trainer.step, trainer.config, ""), arrays)


def main(framework, text, directory, scenarios):
    corpus = load_corpus([text])
    for scenario in scenarios:
        name, _, port = scenario.partition("=")
        os.environ["MASTER_PORT"] = port
        ranks = backend(framework).JoinedRanks(read_launch(), 1024)
        run_scenario(name, framework, corpus, directory / name, ranks)
        ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
