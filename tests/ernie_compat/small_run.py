"""A model small enough for tests, text to train it on, and how to reach a framework that this
process does not hold.
"""

from __future__ import annotations

import json

import processes
from worlds import ROOT, TIMEOUT_S, environment

from ernie_compat.corpus import load_corpus
from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
from ernie_compat.trainer import backend

SIZES = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_experts=4, topk=2, intermediate_size=32, seq_len=16
)  # fmt: skip
SIZE_OPTIONS = "--hidden 32 --layers 2 --heads 2 --experts 4 --topk 2 --intermediate 32 --seq-len 16 --batch 4".split()  # noqa: SIM905
SENTENCES = "the node adds, the router picks; every expert learns what the others leave. {} tokens went by.\n"


def train_config(**changes):
    """Four sequences a step, no checkpoint but the last."""
    given = {"steps": 6, "batch_size": 4, "checkpoint_every": 0, "eval_batches": 1}
    return TrainConfig(**given | changes)


def run_config(**changes):
    """A `RunConfig` of the small model; keyword `train` replaces fields of its `TrainConfig`."""
    train = train_config(**changes.pop("train", {}))
    return RunConfig(**{"model": SIZES, "train": train, "framework": "torch", **changes})


def write_text(directory):
    """Some twenty kilobytes of text in two files; returns their directory."""
    directory.mkdir(exist_ok=True)
    for name in ("a.txt", "b.txt"):
        (directory / name).write_text("".join(SENTENCES.format(i) for i in range(100)))
    return directory


def run_python(*command, **variables):
    """`python COMMAND` to its end."""
    return processes.run(command, environment(**variables), ROOT, timeout=TIMEOUT_S)


def run_program(program, *arguments):
    """Run Python source in a process of its own and return the JSON of its last line of output."""
    result = run_python("-c", program, *arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def chosen_engines(learner):
    """Names of those that the nodes of its model chose."""
    return {
        node._plan.fitted_to_weight(node._state.parameters.parameters()[0]).chosen.name
        for node in learner.decoder.nodes
    }


def first_steps(framework, text):
    """Held-out loss of the initial weights and the figures of four steps in FP8, plain values."""
    corpus, train = load_corpus([text]), train_config()
    learner = backend(framework).Learner(SIZES, train, "fp8", "auto")
    held_out = learner.evaluate(corpus.held_out_batch(0, train.batch_size, SIZES.seq_len))
    results = [
        learner.train_step(corpus.batch(step, train.batch_size, SIZES.seq_len, 0), 1e-2)
        for step in range(1, 5)
    ]
    figures = {"loss": "loss", "aux": "aux_loss", "z": "z_loss", "norm": "grad_norm"}
    state = learner.state()
    return {
        "held_out": held_out,
        **{name: [getattr(r, field) for r in results] for name, field in figures.items()},
        "counts": results[0].expert_counts.tolist(),
        "shapes": {n: list(state[n].shape) for n in state if n.startswith(("weight/", "moment"))},
    }
