"""One rank of a training world: runs the scenarios named on the command line and leaves what it saw
in `<out>/<scenario>/`.

Arguments: framework, text, directory, then `scenario=port` for each scenario in turn.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from small_run import run_config

from ernie_compat.checkpoint import save_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.learner import make_parallel
from ernie_compat.parallel import RankLayout, gather_state, read_launch
from ernie_compat.trainer import MAIN, Trainer

# name: (ep, precision, micro-batches, stop after, resume from another run's checkpoint)
SCENARIOS = {
    "ep4": (4, "fp32", 1, 6, False),
    "ep1": (1, "fp32", 1, 6, False),
    "ep2 micro": (2, "fp32", 2, 6, False),
    "fp8": (2, "fp8", 1, 6, False),
    "fp8 again": (2, "fp8", 1, 6, False),
    "half": (4, "fp32", 1, 3, False),
    "resumed": (2, "fp32", 1, 6, True),
}
BATCH = 8


def scenario_config(name, framework="torch"):
    """The run's settings; a single process uses them with ep 1."""
    ep, precision, micro_batches, _, _ = SCENARIOS[name]
    return run_config(
        framework=framework,
        precision=precision,
        ep=ep,
        train={"batch_size": BATCH, "micro_batches": micro_batches},
    )


def run_scenario(name, framework, corpus, directory, parallel=None):
    """Train; a resumed run leaves what it has loaded."""
    config = scenario_config(name, framework)
    if parallel is None:
        config = run_config(
            **{**config.__dict__, "model": config.model, "ep": 1, "train": config.train.__dict__}
        )
    *_, stop_after, resume = SCENARIOS[name]
    trainer = (Trainer.resume if resume else Trainer.start)(config, corpus, directory, parallel)
    if resume:
        write(directory / "loaded.npz", trainer.learners[MAIN].state(), trainer)
    trainer.train(should_stop=lambda: trainer.step >= stop_after)
    return trainer


def watch_every_training():
    """Each leaves the gradients of its first step, and the losses that this rank has seen, beside
    its checkpoint.
    """
    train = Trainer.train

    def watched(trainer, *arguments, **options):
        gradients = record_gradients(trainer.learners[MAIN])
        done = train(trainer, *arguments, **options)
        write(trainer.directory / "gradients.npz", gradients, trainer)
        losses = json.dumps([record.loss for record in trainer.records])
        rank = trainer.parallel.layout.rank
        (trainer.directory / f"losses{rank}.json").write_text(losses)
        return done

    Trainer.train = watched


def record_gradients(learner):
    """A dictionary that the first optimizer step fills: every rank's gradients, reduced and not yet
    clipped.
    """
    seen, reduce = {}, learner._reduce_gradients

    def watched():
        reduce()
        if not seen:
            named = learner.parameters.items()
            local = {n: np.array(getattr(p, learner.gradient).numpy()) for n, p in named}
            seen.update(gather_state(local, learner.parallel, learner.model.num_experts))

    learner._reduce_gradients = watched
    return seen


def write(path, arrays, trainer):
    if trainer.writes:
        save_checkpoint(path, {"step": trainer.step}, arrays)


def main(framework, text, directory, scenarios):
    watch_every_training()
    corpus = load_corpus([text])
    for scenario in scenarios:
        name, _, port = scenario.partition("=")
        os.environ["MASTER_PORT"] = port
        layout = RankLayout(read_launch(), SCENARIOS[name][0])
        parallel = make_parallel(framework, layout, 1024)
        run_scenario(name, framework, corpus, directory / name, parallel)
        parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
