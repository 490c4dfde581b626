"""The seam between the training loop and a framework.

Importing this module imports no framework. `make_ranks` and `make_learner` import the chosen one and,
for Paddle, switch its torch proxy on for `sonicmoe` before anything of `sonicmoe` that computes is
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sonicmoe.frameworks import load

from .model_config import ModelConfig, TrainConfig
from .ranks import RankLayout, Ranks

if TYPE_CHECKING:
    from .decoder_learner import DecoderLearner


def make_ranks(framework: str, layout: RankLayout, max_tokens: int) -> Ranks:
    """Join the ranks of `layout`; `max_tokens` is the most tokens one rank dispatches at once.
    Errors as `sonicmoe.frameworks.load`.
    """
    return (
        Ranks() if layout.world_size == 1 else _backend(framework).JoinedRanks(layout, max_tokens)
    )


def make_learner(
    framework: str,
    model: ModelConfig,
    train: TrainConfig,
    precision: str,
    engine: str,
    ranks: Ranks | None = None,
) -> DecoderLearner:
    """Build model and optimizer of `framework`, starting from `initial_weight`s of `train.seed`;
    `ranks` None is one rank. Errors as `sonicmoe.frameworks.load`; EngineUnavailableError,
    ConfigError or ShapeError where the engine cannot run here, or not at these sizes.
    """
    learner = _backend(framework).Learner
    made: DecoderLearner = learner(model, train, precision, engine, ranks or Ranks())
    return made


def _backend(framework: str) -> Any:
    load(framework)
    # Imported only here, because importing a backend imports its framework.
    if framework == "paddle":
        from . import paddle_backend as backend
    else:
        from . import torch_backend as backend  # type: ignore[no-redef]
    return backend
