"""Take the inputs of node calls out of a running training, for `sonicmoe numerics --captured`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ernie_compat.corpus import load_corpus
from ernie_compat.learner import make_learner
from ernie_compat.model_config import ModelConfig, TrainConfig

from ..engine.interface import Saved
from ..interop import FRAMEWORK
from ..node.mlp_call import MlpCall
from .call_hooks import CallObserver, forget, observe
from .cases import Array, Case, save_case

Tensor = torch.Tensor

CAPTURE_MODEL = ModelConfig(hidden_size=512, intermediate_size=256, num_layers=3, num_heads=8)
CAPTURE_BATCH = 16


@contextmanager
def captured_calls(name: str) -> Iterator[list[Case]]:
    """Inside the block, every backward of every node appends a copy of its inputs to the list: the
    last layer's comes first.

    Cases are called `{name}-0`, `{name}-1`, ... SwiGLU experts without biases only, whatever engine
    and precision they run in.
    """
    collector = _Collector(name)
    observe(collector)
    try:
        yield collector.cases
    finally:
        forget(collector)


class _Collector(CallObserver):
    def __init__(self, name: str) -> None:
        self._name = name
        self.cases: list[Case] = []

    def before_backward(self, call: MlpCall, dout: Tensor, saved: Saved) -> None:
        self.cases.append(case_of(f"{self._name}-{len(self.cases)}", call, dout, saved))


def case_of(name: str, call: MlpCall, dout: Tensor, saved: Saved) -> Case:
    """The inputs of one call as a case."""
    assert saved.x is not None
    w1, w2 = call.experts.source.native()
    slot_row, row_prob = to_numpy(saved.routing.slot_row), to_numpy(saved.routing.row_prob)
    valid = slot_row >= 0
    probs = np.zeros(valid.shape, dtype=np.float32)
    probs[valid] = row_prob[slot_row[valid].astype(np.int64)]
    return Case(
        name,
        to_numpy(saved.x),
        to_numpy(call.indices),
        probs,
        to_numpy(w1),
        to_numpy(w2),
        to_numpy(dout),
    )


def to_numpy(tensor: Tensor) -> Array:
    """A copy on the host: integers as int64, everything else as fp32."""
    integral = str(tensor.dtype).endswith(("int32", "int64"))
    return np.array(tensor.detach().to(torch.int64 if integral else torch.float32).cpu().numpy())


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
    for step in range(1, steps):
        learner.train_step(
            corpus.batch(step, batch, model.seq_len, train.seed), train.learning_rate(step)
        )
        on_step(step)
    with captured_calls(f"step{steps}") as cases:
        learner.train_step(
            corpus.batch(steps, batch, model.seq_len, train.seed), train.learning_rate(steps)
        )
    on_step(steps)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for layer, case in zip(model.moe_layers, reversed(cases), strict=True):
        object.__setattr__(case, "name", f"step {steps}, layer {layer}")
        paths.append(directory / f"step{steps}-layer{layer}.npz")
        save_case(paths[-1], case)
    return paths
