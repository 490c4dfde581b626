"""The settings of model, training and run: frozen, validated, without a framework; and the least
memory that they need.

Legend: V vocabulary, H hidden, L layers, E experts, K experts per token, I expert intermediate
size, S sequence length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from sonicmoe import SonicMoEConfig
from sonicmoe.config import current_config
from sonicmoe.errors import ConfigError, expect
from sonicmoe.host import count, gpu_present, require_memory

BYTE_VOCABULARY = 256
FRAMEWORKS = ("paddle", "torch")
PRECISIONS = ("fp8", "bf16", "fp32")
SMOOTHING_WINDOW = 25
MOST = 2**63 - 1  # of whole numbers that may become an int64
_RANGE = "range"  # of a field, in its metadata: the least and the largest value


def smoothing_window(steps: int) -> int:
    """Steps that a loss of a run of `steps` is averaged over: a quarter of them, 1 at least and
    `SMOOTHING_WINDOW` at most. A longer window would average short runs from their first step on.
    """
    return min(SMOOTHING_WINDOW, max(1, steps // 4))


def _size(default: int, least: int = 1) -> Any:
    """A field for a whole number."""
    return field(default=default, metadata={_RANGE: (least, MOST)})


def _number(default: float, least: float = 0.0, most: float = float(MOST)) -> Any:
    """A field for a finite number."""
    return field(default=default, metadata={_RANGE: (least, most)})


def _require_ranges(config: Any) -> None:
    """Check every field that has a range: ConfigError names it, its value and what is needed."""
    for one in dataclasses.fields(config):
        if _RANGE not in one.metadata:
            continue
        value, (least, most) = getattr(config, one.name), one.metadata[_RANGE]
        whole = isinstance(one.default, int)
        # True is an int to Python, and NaN lies in no range.
        typed = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        kind = "an integer" if whole else "a number"
        words = f"{one.name} is {value!r}; needed: {kind} from {least} to {most}"
        expect(typed and least <= value <= most, ConfigError, words)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder: RMSNorm, rotary causal attention, `dense_layers` dense SwiGLU layers,
    then MoE layers on the node. ConfigError names the field of an impossible size, its value and
    what is needed.
    """

    vocab_size: int = _size(BYTE_VOCABULARY)
    hidden_size: int = _size(128)
    num_layers: int = _size(3)
    num_heads: int = _size(4)
    num_experts: int = _size(8)
    topk: int = _size(4)
    intermediate_size: int = _size(128)
    seq_len: int = _size(96)
    dense_layers: int = _size(1, least=0)
    aux_loss_coef: float = _number(0.01)
    z_loss_coef: float = _number(1e-3)
    rope_theta: float = _number(10000.0, least=1.0)
    norm_eps: float = _number(1e-6)

    def __post_init__(self) -> None:
        _require_ranges(self)
        words = f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
        expect(self.hidden_size % self.num_heads == 0, ConfigError, words)
        words = f"hidden_size / num_heads is {self.head_dim}; rotary attention needs an even number"
        expect(self.head_dim % 2 == 0, ConfigError, words)
        words = f"topk {self.topk} exceeds num_experts {self.num_experts}"
        expect(self.topk <= self.num_experts, ConfigError, words)
        dense, layers = self.dense_layers, self.num_layers
        words = f"dense_layers {dense} leaves no MoE layer among num_layers {layers}"
        expect(dense < layers, ConfigError, words)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def dense_intermediate_size(self) -> int:
        """Width of a dense layer's MLP: as many active columns as the K experts of a token."""
        return self.topk * self.intermediate_size

    @property
    def moe_layers(self) -> range:
        return range(self.dense_layers, self.num_layers)

    @property
    def parameters(self) -> int:
        """Parameters of the model, by arithmetic: a list of the layers may be longer than the memory."""
        hidden, layers, dense = self.hidden_size, self.num_layers, self.dense_layers
        attention = 4 * hidden * hidden + 2 * hidden
        of_dense = 3 * hidden * self.dense_intermediate_size
        of_moe = self.num_experts * (3 * hidden * self.intermediate_size + hidden)
        ends = 2 * self.vocab_size * hidden + hidden
        return ends + layers * attention + dense * of_dense + (layers - dense) * of_moe


@dataclass(frozen=True)
class TrainConfig:
    """The run: batch, optimizer, schedule, cadence. `batch_size` counts sequences of one optimizer
    step. ConfigError names a field whose value is out of range, the value and what is needed.
    """

    steps: int = _size(300)
    batch_size: int = _size(8)
    micro_batches: int = _size(1)
    # AdamW moves a weight by about the learning rate in every step, and weights are below 1.
    lr: float = _number(8e-4, least=1e-12, most=1.0)
    min_lr_ratio: float = _number(0.1)
    warmup_ratio: float = _number(0.1)
    weight_decay: float = _number(0.1)
    beta1: float = _number(0.9, most=1 - 1e-9)
    beta2: float = _number(0.95, most=1 - 1e-9)
    adam_eps: float = _number(1e-8)
    clip_norm: float = _number(1.0, least=1e-12)
    seed: int = _size(0, least=0)
    checkpoint_every: int = _size(100, least=0)
    eval_batches: int = _size(4, least=0)

    def __post_init__(self) -> None:
        _require_ranges(self)
        parts = self.micro_batches
        words = f"batch_size {self.batch_size} is not a multiple of micro_batches {parts}"
        expect(self.batch_size % parts == 0, ConfigError, words)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine down to `min_lr_ratio * lr`; `step` counts from 1."""
        warm_up = max(1, round(self.steps * self.warmup_ratio))
        if step <= warm_up:
            return self.lr * step / warm_up
        # `max` covers a run that ends with its warm-up, `min` steps beyond the schedule.
        progress = min(1.0, (step - warm_up) / max(1, self.steps - warm_up))
        # The cosine runs from 1 to -1, which is mapped to 1 and the floor.
        floor = self.min_lr_ratio
        return self.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's numbers, apart from the text itself.

    compare, against: train a twin in full precision beside the run, and which one; None leaves the
    choice to the engine that runs (see `trainer.baseline_for`). capture_layers: MoE layers whose
    tensors the last step saves, by their index in the model.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    framework: str = "torch"
    precision: str = "fp8"
    engine: str = "auto"
    compare: bool = False
    against: str | None = None
    capture_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        choices = {
            "framework": FRAMEWORKS, "precision": PRECISIONS, "against": (None, *PRECISIONS[1:]),
        }  # fmt: skip
        for name, known in choices.items():
            value = getattr(self, name)
            expect(value in known, ConfigError, f"{name} is {value!r}; needed: one of {known}")
        # Dense layers come first and route nothing, so they have no tensors of experts.
        layers = self.model.moe_layers
        for layer in self.capture_layers:
            words = f"capture_layers has {layer!r}; the MoE layers of this model are"
            there = type(layer) is int and layer in layers
            expect(there, ConfigError, f"{words} {layers[0]} to {layers[-1]}")

    def require_startable(self, ranks: int) -> None:
        """Refuse what this many ranks cannot train, before they join and before anything is
        allocated. ConfigError where a micro-batch or the experts do not split over them, or this
        machine has less memory than weights, gradients and moments take.
        """
        part = self.train.batch_size // self.train.micro_batches
        for what, size in (("a micro-batch", part), ("num_experts", self.model.num_experts)):
            words = f"{what} of {size} cannot be split over {ranks} ranks"
            expect(size % ranks == 0, ConfigError, f"{words}; needed: a multiple of {ranks}")
        parameters = self.model.parameters
        # Weights, gradients and two moments; beside a GPU only initial weights pass through the host.
        copies = 1 if gpu_present() else 8 if self.compare else 4
        batch = self.train.batch_size * self.model.seq_len
        purpose = f"a model of {count(parameters)} parameters on batches of {count(batch)} bytes"
        # A token is a number and the index that picked it.
        require_memory(4 * copies * parameters // ranks + 16 * batch, purpose)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values; inverse of `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> RunConfig:
        """Rebuild from `to_json` output. ConfigError where a field is missing, unknown or out of
        range.
        """
        try:
            rest = {name: value for name, value in data.items() if name not in ("model", "train")}
            rest["capture_layers"] = tuple(rest["capture_layers"])  # JSON has no tuples
            return cls(ModelConfig(**data["model"]), TrainConfig(**data["train"]), **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"run configuration is not readable: {error}") from None


def node_config(precision: str, engine: str) -> SonicMoEConfig:
    """The node's configuration: only `fp8` quantises; bf16 and fp32 differ in the dtype of the
    tokens alone. Of the two FP8 modes `perf`, unless `SONIC_MOE_FP8_MODE` names the other.
    """
    if precision != "fp8":
        return SonicMoEConfig(fp8_mode="off", engine=engine)
    config = current_config()
    return SonicMoEConfig(fp8_mode=config.fp8_mode if config.fp8 else "perf", engine=engine)


def token_dtype_name(precision: str) -> str:
    """Dtype in which tokens enter the node."""
    return "float32" if precision == "fp32" else "bfloat16"
