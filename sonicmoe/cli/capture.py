"""Inputs of node calls out of a training run, for `sonicmoe numerics --capture-from-training`.
Imported once the command has chosen a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ernie_compat.corpus import load_corpus
from ernie_compat.learner import make_learner
from ernie_compat.model_config import ModelConfig, TrainConfig

from ..diagnostics.capture import captured_calls
from ..diagnostics.cases import save_case
from ..interop import FRAMEWORK

CAPTURE_MODEL = ModelConfig(hidden_size=512, intermediate_size=256, num_layers=3, num_heads=8)
CAPTURE_BATCH = 16


def capture_from_training(
    steps: int,
    directory: Path,
    on_step: Callable[[int], None],
    model: ModelConfig = CAPTURE_MODEL,
    batch: int = CAPTURE_BATCH,
) -> list[Path]:
    """Train the demo decoder with unquantised experts on the standard library's sources and save
    the calls of the last step.

    Returns:
        One .npz per MoE layer, in the order of the layers.
    """
    train = TrainConfig(steps=steps, batch_size=batch)
    corpus = load_corpus()
    learner = make_learner(FRAMEWORK, model, train, "bf16", "reference")

    def train_step(step: int) -> None:
        tokens = corpus.batch(step, batch, model.seq_len, train.seed)
        learner.train_step(tokens, train.learning_rate(step))

    for step in range(1, steps):
        train_step(step)
        on_step(step)
    with captured_calls(f"step{steps}") as cases:
        train_step(steps)
    on_step(steps)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    # Backward visits the last layer first.
    for layer, case in zip(model.moe_layers, reversed(cases), strict=True):
        paths.append(directory / f"step{steps}-layer{layer}.npz")
        save_case(paths[-1], replace(case, name=f"step {steps}, layer {layer}"))
    return paths
