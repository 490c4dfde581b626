"""Inputs of one expert-MLP call as plain numpy arrays: generated, or captured in a file. Imports no
framework.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I; native weights
`w1 [E, N1, H]` (gate, up interleaved), `w2 [E, H, I]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from ..enums import ZCode
from ..errors import ConfigError, ShapeError, expect
from ..host import require_memory
from ..quant.recipes import DEEPSEEK_V3, MXFP8, RECIPES, Fp8Recipe, rows
from .callers import Caller
from .step_dump import Array, DumpError, StepDump, StepSettings, load_dump, save_dump

DATA_KINDS: dict[str, str] = {
    "gaussian": "x, dout and weights are normal",
    "student-t": "x, dout and weights follow Student's t with 3 degrees of freedom: heavy tails",
    "row-spread": "normal, every token of x and of dout times 2^u, u uniform in [-10, 0]",
    "outliers": "normal, 1 % of the channels of x and of dout times 100",
}


class Dispatch(Enum):
    """How rows reach the experts' rank: in bf16, or quantised by their sender with one scale per row
    and 128 columns, or per row; tokens alone, or gradients of the output too (`BOTH`).
    """

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_ROW = "fp8-row"
    FP8_BOTH = "fp8-both"
    FP8_ROW_BOTH = "fp8-row-both"

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients are quantised as tokens are."""
        return self in (Dispatch.FP8_BOTH, Dispatch.FP8_ROW_BOTH)

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale."""
        return self in (Dispatch.FP8_ROW, Dispatch.FP8_ROW_BOTH)

    @property
    def of_baseline(self) -> Dispatch:
        """The same in DeepSeek-V3's way, which has one scale per row and 128 columns."""
        if self is Dispatch.BF16:
            return self
        return Dispatch.FP8_BOTH if self.sends_gradients else Dispatch.FP8


@dataclass(frozen=True)
class Baseline:
    """A recipe and saved-z code that others are measured against.

    absolute: whether the bars on Gaussian data hold beside it.
    slack: a tensor misses this bar from this multiple of the baseline's error on.
    """

    recipe: Fp8Recipe
    z: ZCode
    absolute: bool
    slack: float = 1.03

    @property
    def bf16_tokens_only(self) -> bool:
        """Whether it reads no tokens that arrive in FP8, which have one scale per 128 columns."""
        return self.recipe.x != rows(128)


BASELINES = {
    "deepseek-v3": Baseline(DEEPSEEK_V3, ZCode.E4M3, absolute=True),
    # The bar of recipes that are chosen by name for their speed: not worse, without slack.
    "deepseek-v3.1": Baseline(RECIPES["deepseek-v3-pow2"], ZCode.E4M3, absolute=True, slack=1.0),
    # Power-of-two scales cost more than the absolute bars leave. z is bf16, as engine `mxfp8` has
    # it: a baseline with a coarser z would be easier to meet.
    "mxfp8": Baseline(MXFP8, ZCode.BF16, absolute=False),
}

OUTLIER_SHARE, OUTLIER_GAIN = 0.01, 100.0
SPREAD_OCTAVES = 10.0
_FP64 = 8  # the bytes of a number while a case is generated


@dataclass(frozen=True)
class Sizes:
    """T, H, I, E, K of a generated case.

    Raises:
        ShapeError: a size is below 1, or a token would need more experts than there are.
        ConfigError: this machine has not the memory for them.
    """

    tokens: int = 2048
    hidden: int = 1024
    intermediate: int = 512
    experts: int = 8
    topk: int = 2

    def __post_init__(self) -> None:
        """Refuse sizes no layer has."""
        for size in fields(self):
            value = getattr(self, size.name)
            expect(value >= 1, ShapeError, f"{size.name} is {value}; needed: at least 1")
        expect(
            self.topk <= self.experts,
            ShapeError,
            f"topk is {self.topk}; needed: at most the number of experts, {self.experts}",
        )
        rows = self.tokens * (2 * self.hidden + self.experts + self.topk)
        weights = 3 * self.experts * self.intermediate * self.hidden
        require_memory(_FP64 * (rows + weights), "a case of these sizes")


@dataclass(frozen=True, eq=False)
class Case:
    """One call: x, dout `[T, H]`, w1, w2 as fp32 arrays of bf16 values; probs fp32 and indices
    int64 `[T, K]`, -1 = not here; b1 `[E, N1]` and b2 `[E, H]` in fp32, both or neither.

    settings: how the call ran; generated ones are SwiGLU in the default recipe.
    caller: what the caller calls these tensors, of a captured call.
    first_triple: as in `StepDump`.

    Engine and golden read the same arrays, so a difference between them is the engine's alone.

    Raises:
        ShapeError: the arrays do not belong together.
    """

    name: str
    x: Array
    indices: Array
    probs: Array
    w1: Array
    w2: Array
    dout: Array
    b1: Array | None = None
    b2: Array | None = None
    settings: StepSettings = field(default_factory=StepSettings)
    caller: Caller | None = None
    first_triple: Array | None = None

    def __post_init__(self) -> None:
        """Check shapes, then round to bf16."""
        expect(self.x.size > 0, ShapeError, f"x has shape {self.x.shape}; needed: [T, H]")
        self.step()  # a step checks the shapes against each other
        for name in ("x", "w1", "w2", "dout"):
            # The dataclass is frozen for its users; its own constructor still has to replace the
            # arrays.
            object.__setattr__(self, name, round_to_bf16(getattr(self, name)))
        object.__setattr__(self, "indices", self.indices.astype(np.int64))
        object.__setattr__(self, "probs", self.probs.astype(np.float32))

    @property
    def num_experts(self) -> int:
        return int(self.w2.shape[0])

    def step(self, recipe: str | None = None) -> StepDump:
        """The call as a step in one of `RECIPES` or unquantised, with this activation and bf16
        tokens.
        """
        own = self.settings
        settings = StepSettings(
            own.activation, recipe, activation_parameters=own.activation_parameters
        )
        return StepDump(**{**self._fields(), "settings": settings})

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, step: StepDump) -> Case:
        """A step that has a `dout`; tokens that arrived in FP8 as their values."""
        return cls(**{field.name: getattr(step, field.name) for field in fields(cls)})


def round_to_bf16(values: Array) -> Array:
    """fp32 copy whose values are representable in bf16, rounded to nearest even; NaN and infinity
    stay.
    """
    exact = np.array(values, dtype=np.float32)
    bits = exact.view(np.uint32)
    # Rounding to nearest even in integer arithmetic: adding 0x7FFF rounds up above the middle, and
    # the lowest kept bit decides at the middle. The mask drops the 16 bits that bf16 does not have.
    rounded = (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        & np.uint32(0xFFFF0000)
    ).view(np.float32)
    return np.where(np.isfinite(exact), rounded, exact)


def make_case(kind: str, sizes: Sizes, seed: int) -> Case:
    """A case of one of `DATA_KINDS`; the same bits for the same arguments. Weights have variance 1
    / fan_in before heavy tails.

    Raises:
        ConfigError: `kind` is not one of `DATA_KINDS`.
    """
    expect(kind in DATA_KINDS, ConfigError, f"data is {kind!r}; needed: one of {list(DATA_KINDS)}")
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.standard_t(3, shape) if kind == "student-t" else rng.standard_normal(shape)

    x, dout = draw(sizes.tokens, sizes.hidden), draw(sizes.tokens, sizes.hidden)
    if kind == "row-spread":
        x, dout = (m * 2.0 ** rng.uniform(-SPREAD_OCTAVES, 0, (sizes.tokens, 1)) for m in (x, dout))
    if kind == "outliers":
        for matrix in (x, dout):
            channels = rng.choice(
                sizes.hidden, max(1, round(OUTLIER_SHARE * sizes.hidden)), replace=False
            )
            matrix[:, channels] *= OUTLIER_GAIN
    scores = rng.random((sizes.tokens, sizes.experts))
    weights = rng.uniform(0.1, 1.0, (sizes.tokens, sizes.topk))
    return Case(
        name=kind,
        x=x,
        # The K experts with the smallest random scores: distinct, and uniformly chosen.
        indices=np.argsort(scores, axis=1)[:, : sizes.topk],
        probs=weights / weights.sum(1, keepdims=True),
        w1=draw(sizes.experts, 2 * sizes.intermediate, sizes.hidden) / math.sqrt(sizes.hidden),
        w2=draw(sizes.experts, sizes.hidden, sizes.intermediate) / math.sqrt(sizes.intermediate),
        dout=dout,
    )


def save_case(path: str | Path, case: Case) -> None:
    """Write an .npz that `load_case` and `load_dump` read."""
    save_dump(path, StepDump(**case._fields()))


def load_case(path: str | Path) -> Case:
    """Read what `save_case` wrote, or a dump of a forward and its backward.

    Raises:
        DumpError: the file is missing, no .npz, or lacks an array; the message names it.
        ShapeError: the arrays do not belong together.
    """
    step = load_dump(path)
    expect(step.dout is not None, DumpError, f"{path} holds a forward alone; needed: a backward")
    try:
        return Case.of(step)
    except ShapeError as error:
        raise ShapeError(f"{path}: {error}") from None
