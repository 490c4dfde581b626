"""The settings of model, training and run: frozen, validated, without a framework.

Legend: V vocabulary, H hidden, L layers, E experts, K experts per token, I expert intermediate
size, S sequence length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from sonicmoe.errors import ConfigError, expect

BYTE_VOCABULARY = 256
FRAMEWORKS = ("paddle", "torch")
PRECISIONS = ("fp8", "bf16", "fp32")
BASELINES = ("bf16", "fp32")
SMOOTHING_WINDOW = 25
MOST = 2**63 - 1  # of whole numbers that may become an int64
MOST_LR = 1.0


def smoothing_window(steps: int) -> int:
    """Steps that a loss of a run of `steps` is averaged over: a quarter of them, 1 at least and
    `SMOOTHING_WINDOW` at most. A longer window would average short runs from their first step on.
    """
    return min(SMOOTHING_WINDOW, max(1, steps // 4))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder: RMSNorm, rotary causal attention, `dense_layers` dense SwiGLU layers,
    then MoE layers on the node. ConfigError names the field of an impossible size, its value and
    what is needed.
    """

    vocab_size: int = BYTE_VOCABULARY
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_experts: int = 8
    topk: int = 4
    intermediate_size: int = 128
    seq_len: int = 96
    dense_layers: int = 1
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 1e-3
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            # A model may have no dense layer. Any other size of zero is none.
            if one.type == "int" and one.name != "dense_layers":
                _require_positive(self, one.name)
        words = f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
        expect(self.hidden_size % self.num_heads == 0, ConfigError, words)
        expect(
            self.head_dim % 2 == 0,
            ConfigError,
            f"hidden_size / num_heads is {self.head_dim}; rotary attention needs an even head size",
        )
        expect(
            self.topk <= self.num_experts,
            ConfigError,
            f"topk {self.topk} exceeds num_experts {self.num_experts}; a token cannot pick more "
            "experts than there are",
        )
        dense, layers = self.dense_layers, self.num_layers
        words = f"dense_layers {dense} leaves no MoE layer among num_layers {layers}"
        expect(0 <= dense < layers, ConfigError, words)
        for name in ("aux_loss_coef", "z_loss_coef", "norm_eps"):
            _require_finite(self, name, at_least=0.0)
        _require_finite(self, "rope_theta", at_least=1.0)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def dense_intermediate_size(self) -> int:
        """Width of a dense layer's MLP: as many active columns as the K experts of a token."""
        return self.topk * self.intermediate_size

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.dense_layers, self.num_layers))


@dataclass(frozen=True)
class TrainConfig:
    """The run: batch, optimizer, schedule, cadence. `batch_size` counts sequences of one optimizer
    step. checkpoint: False writes none, at the end neither. ConfigError names a field whose value
    is out of range, the value and what is needed.
    """

    steps: int = 300
    batch_size: int = 8
    micro_batches: int = 1
    lr: float = 8e-4
    min_lr_ratio: float = 0.1
    warmup_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    seed: int = 0
    checkpoint: bool = True
    checkpoint_every: int = 100
    eval_batches: int = 4

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batches"):
            _require_positive(self, name)
        _require_counter(self, "steps", at_least=1)
        for name in ("seed", "checkpoint_every", "eval_batches"):
            _require_counter(self, name, at_least=0)
        parts = self.micro_batches
        words = f"batch_size {self.batch_size} is not a multiple of micro_batches {parts}"
        expect(self.batch_size % parts == 0, ConfigError, words)
        for name in ("lr", "clip_norm"):
            _require_finite(self, name, at_least=0.0)
            value = getattr(self, name)
            expect(value > 0, ConfigError, f"{name} is {value}; needed: above 0")
        for name in ("weight_decay", "adam_eps", "beta1", "beta2", "warmup_ratio", "min_lr_ratio"):
            _require_finite(self, name, at_least=0.0)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            expect(value < 1, ConfigError, f"{name} is {value}; needed: below 1")
        # AdamW moves a weight by about the learning rate in every step, and weights are below 1.
        words = f"lr is {self.lr}; needed: at most {MOST_LR}, and 1e-4 to 1e-2 is usual"
        expect(self.lr <= MOST_LR, ConfigError, words)

    @property
    def warmup_steps(self) -> int:
        return max(1, round(self.steps * self.warmup_ratio))

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine down to `min_lr_ratio * lr`; `step` counts from 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        # `max` covers a run that ends with its warm-up, `min` steps beyond the schedule.
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        # The cosine runs from 1 to -1, which is mapped to 1 and the floor.
        floor = self.min_lr_ratio
        return self.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's numbers, apart from the text itself.

    compare, against: train a twin in full precision beside the run, and which one; None leaves the
    choice to the engine that runs (see `trainer.baseline_for`). ep: ranks of an expert-parallel
    group. capture_layers: MoE layers whose tensors the last step saves, by their index in the model.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    framework: str = "torch"
    precision: str = "fp8"
    engine: str = "auto"
    compare: bool = False
    against: str | None = None
    ep: int = 1
    capture_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        choices = {"framework": FRAMEWORKS, "precision": PRECISIONS, "against": BASELINES}
        for name, known in choices.items():
            value = getattr(self, name)
            chosen = value in known or (value is None and name == "against")
            expect(chosen, ConfigError, f"{name} is {value!r}; needed: one of {known}")
        _require_positive(self, "ep")
        experts = self.model.num_experts
        words = f"num_experts {experts} is not a multiple of ep {self.ep}"
        why = "every rank of a group holds equally many"
        expect(experts % self.ep == 0, ConfigError, f"{words}; {why}")
        # Dense layers come first and route nothing, so they have no tensors of experts.
        first, last = self.model.dense_layers, self.model.num_layers - 1
        for layer in self.capture_layers:
            words = f"capture_layers has {layer!r}; the MoE layers of this model are"
            there = _is_integer(layer) and first <= layer <= last
            expect(there, ConfigError, f"{words} {first} to {last}")

    def require_world(self, world_size: int) -> None:
        """Check that the batch can be split over `world_size` ranks. ConfigError where a
        micro-batch is not a multiple of the ranks.
        """
        # Micro-batches are cut first and then dealt out over the ranks.
        part = self.train.batch_size // self.train.micro_batches
        words = f"a micro-batch of {part} sequences cannot be split over {world_size} ranks"
        needed = f"needed: a multiple of {world_size}"
        expect(part % world_size == 0, ConfigError, f"{words}; {needed}")

    def tokens_per_rank(self, world_size: int) -> int:
        """Most tokens one rank sends through a MoE layer at once: those of a micro-batch, or of an
        evaluation batch.
        """
        # An evaluation batch is not cut into micro-batches, so the whole batch is the bound.
        return self.train.batch_size * self.model.seq_len // world_size

    def to_json(self) -> dict[str, Any]:
        """Nested plain values; inverse of `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        """Rebuild from `to_json` output. ConfigError where a field is missing, unknown or out of
        range.
        """
        try:
            rest = {name: value for name, value in data.items() if name not in ("model", "train")}
            model, train = ModelConfig(**data["model"]), TrainConfig(**data["train"])
            if isinstance(rest.get("capture_layers"), list):  # JSON has no tuples
                rest["capture_layers"] = tuple(rest["capture_layers"])
            config = cls(model=model, train=train, **rest)
        # A field that is compared before its type is known raises TypeError or AttributeError.
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"run configuration is not readable: {error}") from None
        for part in (config.model, config.train, config):
            _require_types(part)
        return config


def _require_positive(config: Any, name: str) -> None:
    value = getattr(config, name)
    words = f"{name} is {value!r}; needed: an integer of at least 1"
    expect(_is_integer(value) and value > 0, ConfigError, words)


def _require_counter(config: Any, name: str, at_least: int) -> None:
    """An integer that arithmetic in 64 bits and in floating point can hold."""
    value = getattr(config, name)
    words = f"{name} is {value!r}; needed: an integer of at least {at_least}, and at most 2^63 - 1"
    expect(_is_integer(value) and at_least <= value <= MOST, ConfigError, words)


def _require_finite(config: Any, name: str, at_least: float) -> None:
    value = getattr(config, name)
    words = f"{name} is {value!r}; needed: a finite number >= {at_least}"
    expect(math.isfinite(value) and value >= at_least, ConfigError, words)


def _is_integer(value: Any) -> bool:
    # True is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)


def _require_types(config: Any) -> None:
    """Every plain field has the type of its default: a file may hold anything."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        words = f"{one.name} is {value!r}; needed: a value like {one.default!r}"
        expect(_has_type_of(value, one.default), ConfigError, words)


def _has_type_of(value: Any, default: Any) -> bool:
    if default is dataclasses.MISSING:  # a nested configuration, which has been checked
        return True
    # The one field without a default of its own type is `against`, a name.
    if default is None:
        return value is None or isinstance(value, str)
    if isinstance(default, float):
        return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= MOST
    return type(value) is type(default)
