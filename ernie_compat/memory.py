"""The least memory that a run needs, known before anything is allocated.

Legend: V vocabulary, H hidden, L layers, E experts, I expert intermediate size, S sequence length,
B sequences of a batch.
"""

from __future__ import annotations

from sonicmoe.host import count, gpu_present, require_memory

from .model_config import ModelConfig, RunConfig

_FP32 = 4
# What a parameter keeps on the host: itself and two moments while a checkpoint is written, and
# beside a model that trains on the host its gradient. Without a checkpoint only the initial weights
# of one learner pass through the host of a GPU.
_KEPT_BESIDE_A_GPU, _KEPT_ON_THE_HOST, _KEPT_WITHOUT_A_CHECKPOINT = 3, 4, 1
# The bytes of a token of a batch: its number, and the index that picked it.
_OF_A_TOKEN = 16


def parameters(model: ModelConfig) -> int:
    """Parameters of the model, by arithmetic: a list of the layers may be longer than the memory."""
    hidden, layers, dense = model.hidden_size, model.num_layers, model.dense_layers
    attention = 4 * hidden * hidden + 2 * hidden
    of_dense = 3 * hidden * model.dense_intermediate_size
    of_moe = model.num_experts * (3 * hidden * model.intermediate_size + hidden)
    ends = 2 * model.vocab_size * hidden + hidden
    return ends + layers * attention + dense * of_dense + (layers - dense) * of_moe


def least_memory(config: RunConfig, world_size: int, on_gpu: bool) -> int:
    """A lower bound of the bytes that one process of a run needs on its host."""
    model, train = config.model, config.train
    learners = 2 if config.compare else 1
    kept = learners * (_KEPT_BESIDE_A_GPU if on_gpu else _KEPT_ON_THE_HOST)
    if on_gpu and not train.checkpoint:
        kept = _KEPT_WITHOUT_A_CHECKPOINT
    weights = kept * _FP32 * parameters(model)
    batch = _OF_A_TOKEN * train.batch_size * (model.seq_len + 1)
    tokens = train.batch_size // train.micro_batches // world_size * model.seq_len
    activations = tokens * _FP32 * (model.vocab_size + model.num_layers * model.hidden_size)
    return weights + batch + (0 if on_gpu else activations)


def require_room(config: RunConfig, world_size: int) -> None:
    """Refuse a run that this machine cannot hold: ConfigError, with the estimate and what is there."""
    model, train = config.model, config.train
    purpose = (
        f"a model of {count(parameters(model))} parameters, trained on batches of "
        f"{count(train.batch_size)} x {count(model.seq_len)} bytes,"
    )
    require_memory(least_memory(config, world_size, gpu_present()), purpose)
