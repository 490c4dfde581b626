"""The seam between the training loop and a framework: the `Learner` protocol, and its factory.

Importing this module imports no framework. `make_learner` imports the chosen one and, for Paddle,
switches its torch proxy on for `sonicmoe` before anything of `sonicmoe` that computes is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sonicmoe.frameworks import load

from .metrics import StepResult
from .model_config import ModelConfig, TrainConfig
from .parallel import Parallel, RankLayout


class Learner(Protocol):
    """A model with its optimizer in one framework. Equal calls on equal state give equal bits.

    Under several ranks, every rank makes the same calls with the whole batch and takes its own part
    of it; results are those of all.
    """

    device: str
    engine: str  # of the experts: the one that runs, never "auto"
    num_parameters: int

    def train_step(self, tokens: np.ndarray, learning_rate: float) -> StepResult:
        """One optimizer step on int64 tokens `[B, S + 1]`, split into the configured number of
        micro-batches.
        """

    def evaluate(self, tokens: np.ndarray) -> float:
        """Mean cross entropy in nats on int64 tokens `[B, S + 1]`, without gradients."""

    def dump_next_step(self, layer: int, path: Path) -> None:
        """Write the inputs of the experts of one MoE layer in the next step, forward and backward,
        to `path` (`sonicmoe.diagnostics.capture.dump`): those of the first micro-batch. DumpError
        where `path` cannot be written.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all ranks' parameters and optimizer state by name; `load_state` of them
        continues bit for bit.

        Every rank calls it. The names do not depend on the number of ranks, so any other number may
        load them.
        """

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over `state()` of an equally configured learner. CheckpointError names the first
        array that is missing, unknown or of another shape.
        """


def make_parallel(framework: str, layout: RankLayout, max_tokens: int) -> Parallel:
    """Join the ranks of `layout`; `max_tokens` is the most tokens one rank dispatches at once.
    Errors as `sonicmoe.frameworks.load`.
    """
    if layout.world_size == 1:
        return Parallel()
    load(framework)
    if framework == "paddle":
        from .paddle_parallel import PaddleParallel

        return PaddleParallel(layout, max_tokens)
    from .torch_parallel import TorchParallel

    return TorchParallel(layout, max_tokens)


def make_learner(
    framework: str,
    model: ModelConfig,
    train: TrainConfig,
    precision: str,
    engine: str,
    parallel: Parallel | None = None,
) -> Learner:
    """Build model and optimizer of `framework`, starting from `initial_weights(model, train.seed)`;
    `parallel` None is one rank. Errors as `sonicmoe.frameworks.load`; EngineUnavailableError,
    ConfigError or ShapeError where the engine cannot run here, or not at these sizes.
    """
    load(framework)
    backend: Any
    if framework == "paddle":
        # Imported only here, because importing a backend imports its framework.
        from . import paddle_backend as backend
    else:
        from . import torch_backend as backend
    return backend.make_learner(model, train, precision, engine, parallel or Parallel())
