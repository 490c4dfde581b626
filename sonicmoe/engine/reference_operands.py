"""The operands of the reference engine's products: which values a GEMM reads, after the recipe's
quantisation and the gather into expert order; and the products of low-rank pairs, fp32 (formulas:
`low_rank.py`).

Legend: T tokens, R padded rows in expert order, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..enums import ACTIVATIONS, ZCode
from ..observe import tap
from ..quant.format import BlockScaledTensor, Code
from ..quant.recipes import BlockShape, Fp8Recipe
from ..quant.reference import dequantize, has_e4m3, quantize
from ..routing.metadata import RoutingMetadata
from .interface import EngineWeight, EngineWeights
from .settings import EngineSettings
from .tokens import Tokens, token_dtype

Tensor = torch.Tensor
Operand = Tensor | BlockScaledTensor
# Quantised operands show themselves (`tap`) under the recipe's field, but for those whose values
# are a stage of their own.
_STAGE_OF_OPERAND = {"x": "x_fp8", "dout": "dout_fp8", "dz": "dz_fp8"}


def token_rows(
    tokens: Tokens, name: str, routing: RoutingMetadata, settings: EngineSettings
) -> Tensor:
    """fp32 `[R, H]` as the GEMMs of x or dout read it (`name` is a field of the recipe): quantised
    once per token, by the sender or here, and gathered after. Blocks of several rows exist after the
    gather only; those codes are the operand of wgrad, and show themselves under its name.
    """
    # The sender's codes are the operand: quantising their values again would round twice.
    if isinstance(tokens, BlockScaledTensor):
        return gather_rows(dequantize(tap(_STAGE_OF_OPERAND[name], tokens)), routing)
    recipe = settings.recipe
    if recipe is None or not recipe.in_expert_order(name):
        return gather_rows(operand(tokens, name, settings, tokens.dtype), routing)
    quantised = quantize_operand(gather_rows(tokens, routing), getattr(recipe, name), recipe)
    return dequantize(tap(f"wgrad_{name}", quantised) if settings.fp8_wgrad else quantised)


def operand(values: Tensor, name: str, settings: EngineSettings, dtype: torch.dtype) -> Tensor:
    """fp32 values of a GEMM's A operand after the recipe's quantisation (`name` is a field of the
    recipe), or rounded to `dtype`.
    """
    stage = _STAGE_OF_OPERAND.get(name, name)
    if settings.recipe is None:
        return tap(stage, rounded(values, dtype))
    return dequantize(
        tap(stage, quantize_operand(values, getattr(settings.recipe, name), settings.recipe))
    )


def wgrad_operands(
    tokens: tuple[str, Tokens],
    rows: tuple[str, Tensor],
    routing: RoutingMetadata,
    settings: EngineSettings,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both operands of a weight gradient, by name: tokens `[T, H]` gathered (x or dout), and rows
    `[R, .]` that are in expert order (dz or y1s).
    """
    (token_name, given), (row_name, beside) = tokens, rows
    # Gathered first, then quantised: blocks of wgrad run along the rows, which only exist after the
    # gather. Tokens that were quantised for their rows are so quantised again: rounded twice.
    gathered = gather_rows(values_of(given), routing)
    # They may stay unquantised under a recipe; without one `operand` rounds to the dtype of the tokens.
    own = settings if settings.fp8_wgrad else replace(settings, recipe=None)
    return (
        operand(gathered, f"wgrad_{token_name}", own, dtype),
        operand(beside, f"wgrad_{row_name}", own, dtype),
    )


def saved_z(z: Tensor, settings: EngineSettings, dtype: torch.dtype) -> Operand:
    """z as kept for backward: 8-bit codes or bf16 under a recipe, else the dtype of the tokens."""
    if settings.recipe is None:
        return z.to(dtype)
    if settings.save_z is ZCode.BF16:
        return _on_its_side(z.to(torch.bfloat16), z, settings)
    code = Code(settings.save_z.value)
    kept = quantize(z, settings.recipe.z, code, settings.recipe.scale_format)
    return _on_its_side(kept, z, settings)


def _on_its_side(kept: Operand, z: Tensor, settings: EngineSettings) -> Operand:
    """z as it was rounded, but under a clamp on its own side of the bound: there its gradient ends, and
    rounding to the nearest would turn one in 30 of those beside it on or off.
    """
    record = ACTIVATIONS[settings.activation]
    if not record.clamps:
        return kept
    limit = record.values(settings.activation_parameters)["limit"]
    # Gate and up in turns; a gate has no bound below.
    is_up = (torch.arange(int(z.shape[1]), device=z.device) % 2).to(torch.bool)
    exact, found = (torch.where(is_up, v.abs(), v) for v in (z, values_of(kept)))
    outwards = ((exact > limit) & (found <= limit)).to(torch.int32)
    inwards = ((exact <= limit) & (found > limit)).to(torch.int32)
    steps = outwards - inwards
    if not isinstance(kept, BlockScaledTensor):
        return (kept.view(torch.int16).to(torch.int32) + steps).to(torch.int16).view(torch.bfloat16)
    byte = kept.bytes.to(torch.int32)
    # Sign and magnitude, of which the largest is 0x7E.
    as_e4m3 = torch.where((byte % 128 == 0x7E) & (steps > 0), byte, byte + steps)
    if kept.code is Code.E4M3:
        return replace(kept, codes=as_e4m3.to(torch.uint8).view(kept.codes.dtype))
    codes = (kept.codes.to(torch.int32) + torch.where(z < 0.0, -steps, steps)).clamp(-127, 127)
    if kept.code is Code.ADAPTIVE:
        codes = torch.where(has_e4m3(kept), (as_e4m3 + 128) % 256 - 128, codes)
    return replace(kept, codes=codes.to(torch.int8))


def quantize_operand(values: Tensor, block: BlockShape, recipe: Fp8Recipe) -> BlockScaledTensor:
    """E4M3 codes in these blocks, with scales in the form of the recipe."""
    return quantize(values, block, Code.E4M3, recipe.scale_format)


def values_of(operand: Operand) -> Tensor:
    """fp32, decoded where it is quantised."""
    return (
        dequantize(operand) if isinstance(operand, BlockScaledTensor) else operand.to(torch.float32)
    )


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values that `dtype` can hold."""
    return values.to(dtype).to(torch.float32)


def experts_with_rows(routing: RoutingMetadata) -> Iterator[tuple[int, int, int, int]]:
    """`(expert, first_row, count, padded_count)` of the experts that have tokens."""
    for expert, (first, count, padded) in enumerate(routing.expert_slices()):
        if count:
            yield expert, first, count, padded


def grouped(
    rows: Tensor,
    weight: EngineWeight,
    routing: RoutingMetadata,
    *,
    transpose_weight: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Per expert `rows @ W` or `rows @ W^T` (+ bias), fp32 `[R, N]`; padding rows are zero.

    weight: native `[E, N, K]`; forward contracts over its columns (`transpose_weight`), dgrad over
    its rows.
    """
    width = int(weight.shape[1] if transpose_weight else weight.shape[2])
    result = torch.zeros((routing.num_rows, width), dtype=torch.float32, device=rows.device)
    for expert, first, count, _ in experts_with_rows(routing):
        # One expert at a time is decoded, so that the fp32 copy of all weights never exists.
        matrix = values_of(weight[expert])
        product = rows[first : first + count] @ (
            matrix.transpose(0, 1) if transpose_weight else matrix
        )
        result[first : first + count] = product if bias is None else product + bias[expert]
    return result


def gather_rows(tokens: Tensor, routing: RoutingMetadata) -> Tensor:
    """`[T, C]` -> fp32 `[R, C]` in expert order; padding rows are zero."""
    rows = torch.zeros(
        (routing.num_rows, int(tokens.shape[1])), dtype=torch.float32, device=tokens.device
    )
    tokens = tokens.to(torch.float32)  # before the gather: Paddle's CPU build gathers no fp16
    for _, first, count, _ in experts_with_rows(routing):
        index = routing.row_token[first : first + count].to(torch.int64)
        rows[first : first + count] = tokens.index_select(0, index)
    return rows


@dataclass(frozen=True, eq=False)
class NarrowProducts:
    """The narrow products of one projection. u and v `[R, width]` are fp32, rounded to the dtype of the tokens."""

    a: Tensor
    b: Tensor
    scale: float
    routing: RoutingMetadata

    @property
    def width(self) -> int:
        return int(self.a.shape[1])

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """u, and the pair's part of the projection of `rows`, which are as the GEMM reads them."""
        u = self._narrow(rows, self.a, transpose=True)
        return u, grouped(u, self.b, self.routing, transpose_weight=True)

    def backward(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """v, and what the pair adds to the gradient of the operand; `gradient` of the projection's
        output, as dgrad reads it.
        """
        v = self._narrow(gradient, self.b, transpose=False)
        return v, grouped(v, self.a, self.routing, transpose_weight=False)

    def gradients(
        self, rows: Tensor, v: Tensor, gradient: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """fp32 `(da, db)`; zeros for experts without rows."""
        device = rows.device
        da, db = (
            torch.zeros(f.shape, dtype=torch.float32, device=device) for f in (self.a, self.b)
        )
        for expert, first, count, _ in experts_with_rows(self.routing):
            true = slice(first, first + count)
            da[expert] = v[true].transpose(0, 1) @ rows[true]
            db[expert] = gradient[true].transpose(0, 1) @ u[true]
        return da, db

    def _narrow(self, rows: Tensor, factor: Tensor, *, transpose: bool) -> Tensor:
        product = grouped(rows, factor, self.routing, transpose_weight=transpose)
        return rounded(product * self.scale, self.a.dtype)


def narrow_products(
    weights: EngineWeights, routing: RoutingMetadata, x: Tokens
) -> list[NarrowProducts | None]:
    """The narrow products of the up- and the down-projection; None where there is no adapter."""
    return [
        pair and NarrowProducts(*pair.operands(token_dtype(x)), pair.scale, routing)
        for pair in (weights.adapters or (None, None))
    ]
