"""The models of loss_gap_bench.py, and the time and memory that they should take on an H200; the head
of that program derives the figures. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ernie_compat.memory import parameters
from ernie_compat.model_config import ModelConfig, TrainConfig

# docs/lab/demo.md, "On a GPU": the model, its tokens per step, and the seconds of a step of both.
MEASURED = ModelConfig(
    hidden_size=2048,
    intermediate_size=1024,
    num_experts=16,
    topk=8,
    num_layers=4,
    num_heads=16,
    seq_len=512,
)
MEASURED_TOKENS, MEASURED_S = 16_384, 0.0812 + 0.0911
PRECISIONS = 2
# Of the optimizer, per parameter: the norm reads the gradient, clipping reads and writes it, AdamW
# reads four tensors and writes three, and zeroing writes one more. All are fp32.
OPTIMIZER_BYTES, COPY_BYTES_PER_S = 44, 4.24e12
STATE_BYTES = 16  # per parameter: weight, gradient, two moments


@dataclass(frozen=True)
class Preset:
    """A model and its schedule. alone: it takes a GPU for itself."""

    model: ModelConfig
    train: TrainConfig
    alone: bool = False


PRESETS = {
    "420m": Preset(MEASURED, TrainConfig(steps=3000, batch_size=32, lr=2e-4)),
    # The layer of Qwen3-30B-A3B at half its width: H / I = 2.7, 128 experts, 8 of them for a token.
    "1b": Preset(
        ModelConfig(
            hidden_size=1024,
            intermediate_size=384,
            num_experts=128,
            topk=8,
            num_layers=8,
            num_heads=16,
            seq_len=512,
        ),
        TrainConfig(steps=3000, batch_size=16, lr=2e-4),
        alone=True,
    ),
    "tiny": Preset(
        ModelConfig(
            hidden_size=32,
            intermediate_size=32,
            num_experts=4,
            topk=2,
            num_layers=2,
            num_heads=2,
            seq_len=16,
        ),
        TrainConfig(steps=8, batch_size=4),
    ),
}


def with_steps(preset: Preset, steps: int | None) -> Preset:
    """The preset with another number of steps, if one is given."""
    return preset if steps is None else replace(preset, train=replace(preset.train, steps=steps))


def flops_per_token(model: ModelConfig) -> float:
    """Of the products of forward and backward; a dense layer is as wide as the K experts."""
    hidden = model.hidden_size
    mlp = 3 * model.topk * model.intermediate_size * hidden
    # Causal attention looks at half of the sequence, twice: scores and values.
    attention = 4 * hidden * hidden + model.seq_len * hidden
    products = model.num_layers * (mlp + attention) + model.vocab_size * hidden
    return 6.0 * products


def optimizer_seconds(model: ModelConfig) -> float:
    """Of one step in one precision."""
    return OPTIMIZER_BYTES * parameters(model) / COPY_BYTES_PER_S


def expected_seconds(preset: Preset) -> float:
    """Of the steps of one seed alone on an H200, both precisions, as the head of the program has it."""
    tokens = preset.train.batch_size * preset.model.seq_len
    products = flops_per_token(preset.model) * tokens
    share = products / (flops_per_token(MEASURED) * MEASURED_TOKENS)
    rest = MEASURED_S - PRECISIONS * optimizer_seconds(MEASURED)
    return preset.train.steps * (rest * share + PRECISIONS * optimizer_seconds(preset.model))


def state_bytes(preset: Preset) -> int:
    """What weights, gradients and moments of both precisions take on the GPU."""
    return PRECISIONS * STATE_BYTES * parameters(preset.model)


def plan_line(name: str, preset: Preset, seeds: Sequence[int]) -> str:
    """What is trained, and how long that should take on an H200."""
    train, model = preset.train, preset.model
    return (
        f"{name}: {parameters(model):,} parameters, {train.steps} steps of "
        f"{train.batch_size * model.seq_len:,} tokens, seeds {', '.join(map(str, seeds))}; "
        f"on one H200 about {expected_seconds(preset):.0f} s a seed, and "
        f"{state_bytes(preset) / 2**30:.1f} GiB of weights, gradients and moments"
    )
