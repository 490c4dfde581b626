"""Inputs of one expert-MLP call as plain numpy arrays, generated. Imports no framework.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I; native weights
`w1 [E, N1, H]` (gate, up interleaved), `w2 [E, H, I]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..bench.shapes import Shape
from ..enums import is_glu
from ..errors import expect
from ..host import require_memory
from .step_dump import Array, DumpError, StepDump, StepSettings, need_shape

_FP64 = 8  # the bytes of a number while a case is generated


@dataclass(frozen=True)
class CaseSizes(Shape):
    """T, H, I, E, K of a generated case. ConfigError where this machine has not the memory."""

    tokens: int = 2048
    hidden: int = 1024
    intermediate: int = 512
    experts: int = 8
    topk: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.tokens * (2 * self.hidden + self.experts + self.topk)
        weights = 3 * self.experts * self.intermediate * self.hidden
        require_memory(_FP64 * (rows + weights), "a case of these sizes")


# Of `sonicmoe verify`: several parts of 128 tokens, and a loop over tokens takes no time.
VERIFIED = CaseSizes(tokens=300, hidden=64, intermediate=48, experts=6, topk=3)


def as_case(step: StepDump) -> StepDump:
    """A step that recipes can be measured on: x, w1, w2 and dout as fp32 arrays of bf16 values, so
    that engine and golden read the same numbers. Tokens that arrived in FP8 are their values.
    ShapeError without a token, DumpError without a `dout`.
    """
    need_shape(step.x.size > 0, "x", step.x, "[T, H]")
    expect(step.dout is not None, DumpError, "it holds a forward alone; needed: a backward")
    changes: dict[str, Any] = dict.fromkeys(("x_codes", "x_scale", "dout_codes", "dout_scale"))
    for name in ("x", "w1", "w2", "dout"):
        changes[name] = round_to_bf16(getattr(step, name))
    changes |= {"indices": step.indices.astype(np.int64), "probs": step.probs.astype(np.float32)}
    return replace(step, **changes)


def round_to_bf16(values: Array) -> Array:
    """fp32 copy whose values are representable in bf16, rounded to nearest even; NaN and infinity
    stay.
    """
    exact = np.array(values, dtype=np.float32)
    bits = exact.view(np.uint32)
    # Rounding to nearest even in integer arithmetic: adding 0x7FFF rounds up above the middle, and
    # the lowest kept bit decides at the middle. The mask drops the 16 bits that bf16 does not have.
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + lowest_kept) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(exact), rounded.view(np.float32), exact)


def random_step(
    name: str,
    settings: StepSettings,
    sizes: CaseSizes,
    rng: np.random.Generator,
    draw: Callable[..., Any],
    tokens: tuple[Array, Array],
) -> StepDump:
    """A step of x and dout `[T, H]`, in fp64. Weights have variance 1 / fan_in where the numbers of
    `draw(*shape)` have variance 1.
    """
    x, dout = tokens
    scores = rng.random((sizes.tokens, sizes.experts))
    weights = rng.uniform(0.1, 1.0, (sizes.tokens, sizes.topk))
    width = sizes.intermediate * (2 if is_glu(settings.computed.activation) else 1)
    return StepDump(
        name,
        settings,
        x=x,
        # The K experts with the smallest random scores: distinct, and uniformly chosen.
        indices=np.argsort(scores, axis=1)[:, : sizes.topk],
        probs=weights / weights.sum(1, keepdims=True),
        w1=draw(sizes.experts, width, sizes.hidden) / math.sqrt(sizes.hidden),
        w2=draw(sizes.experts, sizes.hidden, sizes.intermediate) / math.sqrt(sizes.intermediate),
        dout=dout,
    )
