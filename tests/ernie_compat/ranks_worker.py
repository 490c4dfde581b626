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
    "ep2 micro without waiting": (2, "fp32", 2, 6, False),
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
        wait_for_counts="without waiting" not in name,
        train={"batch_size": BATCH, "micro_batches": micro_batches},
    )


def run_scenario(name, framework, corpus, directory, parallel=None):
    """Train, recording the reduced gradients of the first step."""
    config = scenario_config(name, framework)
    if parallel is None:
        config = run_config(
            **{**config.__dict__, "model": config.model, "ep": 1, "train": config.train.__dict__}
        )
    *_, stop_after, resume = SCENARIOS[name]
    trainer = (Trainer.resume if resume else Trainer.start)(config, corpus, directory, parallel)
    if resume:
        write(directory / "loaded.npz", trainer.learners[MAIN].state(), trainer)
    gradients = record_gradients(trainer.learners[MAIN])
    trainer.train(should_stop=lambda: trainer.step >= stop_after)
    write(directory / "gradients.npz", gradients, trainer)
    return trainer


def record_gradients(learner):
    """A dictionary that the first optimizer step fills: every rank's gradients, reduced and not yet
    clipped.
    """
    seen, reduce = {}, learner._reduce_gradients

    def watched():
        reduce()
        if not seen:
            attribute = (
                "main_grad"
                if hasattr(next(iter(learner.parameters.values())), "main_grad")
                else "grad"
            )
            local = {
                n: np.array(getattr(p, attribute).numpy()) for n, p in learner.parameters.items()
            }
            seen.update(gather_state(local, learner.parallel, learner.model.num_experts))

    learner._reduce_gradients = watched
    return seen


def write(path, arrays, trainer):
    if trainer.writes:
        save_checkpoint(path, {"step": trainer.step}, arrays)


def main(framework, text, directory, scenarios):
    corpus = load_corpus([text])
    for scenario in scenarios:
        name, _, port = scenario.partition("=")
        os.environ["MASTER_PORT"] = port
        layout = RankLayout(read_launch(), SCENARIOS[name][0])
        waits = scenario_config(name, framework).wait_for_counts
        parallel = make_parallel(framework, layout, 1024, waits)
        trainer = run_scenario(name, framework, corpus, directory / name, parallel)
        losses = [record.loss for record in trainer.records]
        (directory / name / f"losses{layout.rank}.json").write_text(json.dumps(losses))
        parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
