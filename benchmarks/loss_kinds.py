"""What loss.py trains the experts in: this package's engine in BF16 or FP8 with any setting, or an
emulation of the FP8 layer in which one of its six products, or z, stays in BF16.

The emulation multiplies bf16 values with fp32 sums: the values of FP8 codes by the package's own
quantiser, in the blocks of the default recipe. A value of a code times its fp32 scale has more bits
than bf16, so it is rounded once more, by 2^-9 of itself at most, where E4M3 rounds by 2^-4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from loss_model import BF16, Experts

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.quant.format import Code
from sonicmoe.quant.recipes import RECIPES, BlockShape
from sonicmoe.quant.reference import dequantize, quantize
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
RECIPE = RECIPES[SonicMoEConfig().resolve().recipe]


def experts_of(kind: str, compiled: bool) -> Experts:
    """The experts of a kind; compiled: whether an emulation's quantisers are compiled."""
    if kind in ENGINE:
        fp8, settings = ENGINE[kind]
        return functools.partial(_by_engine, fp8, SonicMoEConfig(**settings))
    return functools.partial(_by_emulation, kind.removeprefix(EMULATED).strip("-"), compiled)


def _by_engine(
    fp8: bool, config: SonicMoEConfig, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    with config.activate():
        return expert_mlp(x, ids, probs, w1, w2, None, None, SWIGLU, use_fp8=fp8)


def _by_emulation(
    plain: str, compiled: bool, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    return _Emulated.apply(x, ids, probs, w1, w2, plain, compiled)  # type: ignore[no-any-return]


class _Emulated(torch.autograd.Function):
    """`plain` is the product, or z, whose operands are bf16 and no codes; "" is none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        w1: Tensor,
        w2: Tensor,
        plain: str,
        compiled: bool,
    ) -> Tensor:
        read = functools.partial(_operand, plain, compiled)
        routing = build_routing(ids, probs, int(w1.shape[0]), alignment=RECIPE.row_alignment)
        spans = _spans(routing)
        z = _grouped(_rows(read(x, "up", RECIPE.x), routing), read(w1, "up", RECIPE.w1).mT, spans)
        y1 = read(activate(z, SWIGLU), "down", RECIPE.y1)
        y2 = _grouped(y1, read(w2, "down", RECIPE.w2).mT, spans).to(BF16)
        code = Code(SonicMoEConfig().resolve().save_z.value)
        ctx.save_for_backward(x, w1, w2, read(z, "z", RECIPE.z, code))
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
        y1s = y1 * weights
        del z, y1, dy1
        left = read(_rows(dout, routing), "dw2", RECIPE.wgrad_dout)
        dw2 = _by_expert(left, read(y1s, "dw2", RECIPE.wgrad_y1s), spans)
        left = read(dz, "dw1", RECIPE.wgrad_dz)
        dw1 = _by_expert(left, read(_rows(x, routing), "dw1", RECIPE.wgrad_x), spans)
        dx = aggregate(dx_rows, routing, weighted=False, dtype=x.dtype)
        return dx, None, dprobs, dw1, dw2, None, None


def _operand(
    plain: str,
    compiled: bool,
    values: Tensor,
    product: str,
    block: BlockShape,
    code: Code = Code.E4M3,
) -> Tensor:
    """bf16 values that a product reads: rounded, or by way of codes."""
    return values.to(BF16) if product == plain else _coder(block, code, compiled)(values)


@functools.cache
def _coder(block: BlockShape, code: Code, compiled: bool) -> Callable[[Tensor], Tensor]:
    def coded(values: Tensor) -> Tensor:
        return dequantize(quantize(values, block, code, RECIPE.scale_format)).to(BF16)

    # Each block, code and shape is a graph of its own, and all have the code of this one function.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(coded, dynamic=False, fullgraph=True) if compiled else coded


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
    out = rows.new_zeros((rows.shape[0], weights.shape[2]), dtype=torch.float32)
    for expert, (first, count) in enumerate(spans):
        if count:
            out[first : first + count] = _product(rows[first : first + count], weights[expert])
    return out


def _by_expert(left: Tensor, right: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """`left_e^T right_e` over each expert's rows: fp32 `[E, M, N]`."""
    out = left.new_zeros((len(spans), left.shape[1], right.shape[1]), dtype=torch.float32)
    for expert, (first, count) in enumerate(spans):
        if count:
            out[expert] = _product(left[first : first + count].T, right[first : first + count])
    return out
