"""What loss.py trains the experts in: this package's engine in BF16 or FP8 with any setting, or an
emulation of the FP8 layer in which one of its six products, or z, stays in BF16.

The emulation is the FP8 engine's arithmetic in plain tensor operations: the same operands in the
same blocks and codes, and fp32 sums. One thing differs. Its products read bf16, and a code times its
fp32 scale has more bits than that, so an operand is rounded once more, by 2^-9 of itself at most,
where E4M3 rounds by 2^-4. Nothing is compiled, the number of rows of a GPU does not change from step
to step, and the host waits once a layer, for the rows of each expert.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from loss_model import BF16, Experts
from torch.nn import functional as F

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.quant.format import Code
from sonicmoe.quant.recipes import RECIPES, BlockShape
from sonicmoe.quant.reference import AMAX_FLOOR, GROUP, SPREAD, block_scales
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.combine import aggregate, scatter_to_slots

Tensor = torch.Tensor
SWIGLU = ActivationType.SWIGLU
PRODUCTS = ("up", "down", "dgated", "dx", "dw1", "dw2")
# name -> what the engine is told
ENGINE: dict[str, tuple[bool, dict[str, Any]]] = {
    "bf16": (False, {}),
    "fp8": (True, {}),
    "disturbed": (False, {}),  # BF16, whose weights loss.py disturbs once
    "int8": (True, {"save_z": ZCode.INT8}),
    "z-bf16": (True, {"save_z": ZCode.BF16}),
    "wgrad-bf16": (True, {"fp8_wgrad": False}),
}
EMULATED = "emulated"
KINDS = (*ENGINE, EMULATED, *(f"{EMULATED}-{name}" for name in (*PRODUCTS, "z")))
AFTER = "-after-"
RECIPE = RECIPES[SonicMoEConfig().resolve().recipe]
SAVED_Z = Code(SonicMoEConfig().resolve().save_z.value)
OPERAND = BF16


def split_kind(name: str) -> tuple[str, int]:
    """A kind, and the first steps of a training that it leaves to BF16: of `fp8-after-200` 200.

    Raises:
        ValueError: there is no such kind.
    """
    kind, after, steps = name.partition(AFTER)
    if kind not in KINDS or (after and not steps.isdecimal()):
        raise ValueError(f"{name!r} is none of {', '.join(KINDS)}, and none of them with {AFTER}N")
    return kind, int(steps or 0)


def experts_of(kind: str) -> Experts:
    """The experts of a kind."""
    if kind in ENGINE:
        fp8, settings = ENGINE[kind]
        return functools.partial(_by_engine, fp8, SonicMoEConfig(**settings))
    return functools.partial(_by_emulation, kind.removeprefix(EMULATED).strip("-"))


def _by_engine(
    fp8: bool, config: SonicMoEConfig, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    with config.activate():
        return expert_mlp(x, ids, probs, w1, w2, None, None, SWIGLU, use_fp8=fp8)


def _by_emulation(
    plain: str, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    return _Emulated.apply(x, ids, probs, w1, w2, plain)  # type: ignore[no-any-return]


class _Emulated(torch.autograd.Function):
    """`plain` is the product, or z, whose operands are bf16 and no codes; "" is none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, plain: str
    ) -> Tensor:
        read = functools.partial(_operand, plain)
        alignment = RECIPE.row_alignment
        routing = build_routing(ids, probs.detach(), int(w1.shape[0]), alignment=alignment)
        spans = _spans(routing)
        z = _grouped(_rows(read(x, "up", RECIPE.x), routing), read(w1, "up", RECIPE.w1).mT, spans)
        y1 = read(activate(z, SWIGLU), "down", RECIPE.y1)
        y2 = _grouped(y1, read(w2, "down", RECIPE.w2).mT, spans).to(BF16)
        del y1
        saved_z = z.to(BF16) if plain == "z" else coded(z, RECIPE.z, SAVED_Z)
        ctx.save_for_backward(x, w1, w2, saved_z)
        ctx.routing, ctx.spans, ctx.read = routing, spans, read
        return aggregate(y2, routing, weighted=True, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, z = ctx.saved_tensors
        routing, spans, read = ctx.routing, ctx.spans, ctx.read
        weights = routing.row_prob.unsqueeze(-1)
        w2_read = read(w2, "dgated", RECIPE.w2_dgrad)
        dy1 = _grouped(_rows(read(dout, "dgated", RECIPE.dout), routing), w2_read, spans)
        y1, dz = activate_backward(z.float(), dy1 * weights, SWIGLU)
        dprobs = scatter_to_slots((dy1 * y1).sum(-1), routing)
        w1_read = read(w1, "dx", RECIPE.w1_dgrad)
        dx_rows = _grouped(read(dz, "dx", RECIPE.dz), w1_read, spans).to(BF16)
        dx = aggregate(dx_rows, routing, weighted=False, dtype=x.dtype)
        y1s = y1 * weights
        del z, y1, dy1, w1_read, w2_read, dx_rows
        left = read(_rows(dout, routing), "dw2", RECIPE.wgrad_dout)
        dw2 = _by_expert(left, read(y1s, "dw2", RECIPE.wgrad_y1s), spans)
        left = read(dz, "dw1", RECIPE.wgrad_dz)
        dw1 = _by_expert(left, read(_rows(x, routing), "dw1", RECIPE.wgrad_x), spans)
        return dx, None, dprobs, dw1, dw2, None


def _operand(plain: str, values: Tensor, product: str, block: BlockShape) -> Tensor:
    """What a product reads, in the dtype of operands: the values, or those of their codes."""
    return (values if product == plain else coded(values, block)).to(OPERAND)


def coded(values: Tensor, block: BlockShape, code: Code = Code.E4M3) -> Tensor:
    """fp32 `[..., R, C]`: `dequantize(quantize(values, block, code))` to the bit, with a third of its
    passes over memory. A block with a NaN or an infinity is NaN.
    """
    n_rows, n_cols = values.shape[-2:]
    missing = -n_rows % block.rows, -n_cols % block.cols
    if any(missing):
        values = F.pad(values, (0, missing[1], 0, missing[0]))
    tiles = values.unflatten(-1, (-1, block.cols)).unflatten(-3, (-1, block.rows))
    amax = torch.linalg.vector_norm(tiles, math.inf, (-3, -1), keepdim=True).float()
    amax = amax.clamp(min=AMAX_FLOOR)
    # The largest value of a block may lie a rounding above 448 or 127, and both round it back.
    if code is not Code.ADAPTIVE:
        scale_inv, multiplier = block_scales(amax, code, RECIPE.scale_format)
        read = _in_e4m3(tiles * multiplier) if code is Code.E4M3 else (tiles * multiplier).round()
    else:
        wide = _is_wide(tiles, amax)
        both = [block_scales(amax, one, RECIPE.scale_format) for one in (Code.E4M3, Code.INT8)]
        scale_inv, multiplier = (torch.where(wide, *pair) for pair in zip(*both, strict=True))
        scaled = tiles * multiplier
        read = torch.where(wide, _in_e4m3(scaled), scaled.round())
    return (read * scale_inv).flatten(-4, -3).flatten(-2)[..., :n_rows, :n_cols]


def _in_e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()


def _is_wide(tiles: Tensor, amax: Tensor) -> Tensor:
    """Whether the adaptive code has E4M3 in a block, of one row: `quant.reference` has the rule."""
    pairs = tiles.unflatten(-1, (-1, GROUP, 2))  # [..., nR, 1, nC, groups, 8 pairs, gate or up]
    groups = torch.linalg.vector_norm(pairs, math.inf, -2)
    least = torch.where(groups > 0, groups, math.inf).flatten(-2).amin(-1, keepdim=True)
    return (least * SPREAD < amax) & amax.isfinite()


def _spans(routing: Any) -> list[tuple[int, int]]:
    """The first row and the padded number of rows of each expert, read from the device."""
    offsets = routing.padded_offsets.tolist()
    return [(first, last - first) for first, last in itertools.pairwise(offsets)]


def _rows(tokens: Tensor, routing: Any) -> Tensor:
    """Tokens `[T, H]` gathered into expert order `[R, H]`; padding rows are zero."""
    token = routing.row_token.long()
    return torch.where((token >= 0).unsqueeze(-1), tokens[token.clamp(min=0)], 0.0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of bf16 operands, whose fp32 sums are not rounded."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]
    return a.float() @ b.float()  # a host's product has no such argument


def _grouped(rows: Tensor, weights: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Each expert's rows `[R, C]` times its matrix `[E, C, N]`: fp32 `[R, N]`."""
    out = rows.new_empty((rows.shape[0], weights.shape[2]), dtype=torch.float32)
    for expert, (first, count) in enumerate(spans):
        if count:
            out[first : first + count] = _product(rows[first : first + count], weights[expert])
    out[sum(count for _, count in spans) :] = 0.0  # padding behind the last expert, on a GPU
    return out


def _by_expert(left: Tensor, right: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """`left_e^T right_e` over each expert's rows: fp32 `[E, M, N]`."""
    out = left.new_zeros((len(spans), left.shape[1], right.shape[1]), dtype=torch.float32)
    for expert, (first, count) in enumerate(spans):
        if count:
            out[expert] = _product(left[first : first + count].T, right[first : first + count])
    return out
