"""Weights of frozen experts as FP8 codes alone: 1 byte a weight and 4 bytes a block, in the order that
forward reads. Every backward transposes them into memory of its own, one projection at a time.

Blocks are those of recipe `dx256`. The scales of an expert are powers of two where that keeps it more
exactly, as it does what was MXFP4, and quotients of its largest values elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.interface import Engine, EngineWeights
from ..engine.settings import EngineSettings
from ..enums import EngineName
from ..errors import ConfigError, LayoutError, expect
from ..interop import plain_ops
from ..layouts import Codes, WeightLayout
from ..quant.format import BlockScaledTensor, Code, scale_shape
from ..quant.gpu import W1_BLOCK, W2_BLOCK
from ..quant.recipes import BlockShape, ScaleFormat
from ..quant.reference import dequantize, quantize

Tensor = torch.Tensor
BLOCKS = W1_BLOCK, W2_BLOCK
READERS = EngineName.HOPPER.value, EngineName.REFERENCE.value
_FORMATS = ScaleFormat.POW2, ScaleFormat.FP32
_AT_ONCE = 1 << 26  # weights that are fp32 for a moment


@dataclass(frozen=True)
class Rounding:
    """What codes lost of the weights that they were made of.

    weights: how many there are. changed: how many of them the codes do not stand for exactly, in
    the dtype that they had. lost, norm: sums of squares, of the differences and of the weights.
    """

    weights: int = 0
    changed: int = 0
    lost: float = 0.0
    norm: float = 0.0

    def __add__(self, other: Rounding) -> Rounding:
        both = self.weights + other.weights, self.changed + other.changed
        return Rounding(*both, self.lost + other.lost, self.norm + other.norm)

    @property
    def error(self) -> float:
        """Relative RMSE; 0 where all weights are zeros."""
        return math.sqrt(self.lost / self.norm) if self.norm else 0.0


def to_codes(weight: Tensor, layout: WeightLayout, index: int) -> tuple[Codes, Rounding]:
    """A stacked weight `[E, ..]` in `layout`, w1 where `index` is 0 and w2 where it is 1, as codes on
    its device; beside them no more than 64 M weights are fp32 at a time, or those of one expert.

    Raises:
        LayoutError: a value is not finite.
    """
    block, native = BLOCKS[index], (layout.native_w1, layout.native_w2)[index]
    rounding = Rounding()
    with plain_ops():
        experts, first, second = (int(size) for size in weight.shape)
        shape = (experts, second, first) if layout.transposed else (experts, first, second)
        held = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        grid = scale_shape(shape, block)
        scales = torch.empty(grid, dtype=torch.int32, device=weight.device)
        step = max(1, _AT_ONCE // max(1, first * second))
        for begin in range(0, experts, step):
            part = slice(begin, begin + step)
            held[part], scales[part], lost = _nearest(native(weight.detach()[part]), block)
            rounding += lost
    return Codes(held, scales), rounding


def _nearest(values: Tensor, block: BlockShape) -> tuple[Tensor, Tensor, Rounding]:
    """Codes and scales of these experts, each in the format that loses less of it, so that they do not
    depend on how many experts come at once.
    """
    exact = values.to(torch.float32)
    norm = float(exact.double().square().sum())
    words = "a weight of the experts is not finite; needed: finite weights to freeze"
    expect(math.isfinite(norm), LayoutError, words)
    best: list[Tensor] = []
    for form in _FORMATS:
        q = quantize(exact, block, Code.E4M3, form)
        meant = dequantize(q)
        lost = (meant - exact).double().square().sum((1, 2), keepdim=True)
        changed = (meant.to(values.dtype) != values).sum((1, 2), keepdim=True)
        found = [lost, changed, q.bytes, q.scale_inv.view(torch.int32)]
        is_better = lost < best[0] if best else torch.ones_like(lost, dtype=torch.bool)
        pairs = zip(found, best or found, strict=True)
        best = [torch.where(is_better, new, old) for new, old in pairs]
        if not best[1].any():
            break
    lost, changed, held, scales = best
    return held, scales, Rounding(values.numel(), int(changed.sum()), float(lost.sum()), norm)


def from_codes(
    codes: Codes, layout: WeightLayout, index: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The inverse of `to_codes`: what the codes stand for, in `dtype`, as `layout` has it."""
    to_user = (layout.user_w1, layout.user_w2)[index]
    with plain_ops():
        made: Tensor | None = None
        for expert in range(len(codes.held)):
            part = _block_scaled(Codes(*[each[expert : expert + 1] for each in codes]), index)
            values = to_user(dequantize(part, dtype))
            if made is None:
                made = values.new_empty((len(codes.held), *values.shape[1:]))
            made[expert : expert + 1] = values
    words = "codes of no experts"
    expect(made is not None, LayoutError, f"{words}; needed: one or more")
    return made  # type: ignore[return-value]


def engine_weights(engine: Engine, weights: Any, settings: EngineSettings) -> EngineWeights:
    """Frozen `(w1, w2, b1, b2)`, the first two as `Codes`, as an engine reads them; no copy but of
    biases that are not fp32.

    Raises:
        ConfigError: the call computes without FP8, with other blocks, or by an engine that does not
            read such codes.
    """
    check_reader(settings, engine)
    w1, w2, b1, b2 = weights
    with plain_ops():
        held = _block_scaled(w1, 0), _block_scaled(w2, 1)
        biases = [
            None if b is None else b.detach().to(torch.float32).contiguous() for b in (b1, b2)
        ]
        return EngineWeights(*held, *held, b1=biases[0], b2=biases[1])


def check_reader(settings: EngineSettings, engine: Engine) -> None:
    """Refuse what cannot compute with frozen codes."""
    recipe = settings.recipe
    expect(
        recipe is not None,
        ConfigError,
        f"the experts are frozen as FP8 codes, and engine {engine.name!r} computes in BF16 here; needed: FP8 "
        "(experts_implementation='sonicmoe_fp8', use_fp8=True or SONIC_MOE_FP8_MODE=perf) on a GPU that "
        "has it, or thaw_experts(model)",
    )
    assert recipe is not None
    blocks = (recipe.w1, recipe.w2) == BLOCKS and recipe.shares_weight_buffers
    expect(
        engine.joins_codes and blocks,
        ConfigError,
        f"the experts are frozen as codes of recipe 'dx256', and engine {engine.name!r} with recipe {recipe.name!r} reads "
        f"others; needed: engine {' or '.join(map(repr, READERS))} with recipe 'dx256', or "
        "thaw_experts(model)",
    )


def _block_scaled(codes: Codes, index: int) -> BlockScaledTensor:
    held, scales = (each.detach() for each in codes)
    words = f"{('w1', 'w2')[index]}: codes {tuple(held.shape)} with scales {tuple(scales.shape)}"
    fits = tuple(scales.shape) == scale_shape(tuple(held.shape), BLOCKS[index])
    expect(fits, LayoutError, f"{words}; needed: one scale per block of {BLOCKS[index]}")
    whole = held.is_contiguous() and scales.is_contiguous()
    expect(
        whole, LayoutError, f"{words} are not contiguous; needed: codes as freeze_experts made them"
    )
    return BlockScaledTensor.from_bytes(held, scales.view(torch.float32), BLOCKS[index], Code.E4M3)
