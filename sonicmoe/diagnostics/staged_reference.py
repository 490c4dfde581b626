"""The reference engine with every stage shown through `tap`: same building blocks, same bits, and a planted fault flows on."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..engine import reference as parts
from ..engine.activations import activate, activate_backward
from ..engine.interface import (
    EngineSettings,
    EngineWeights,
    GradAccumulators,
    PendingWgrad,
    Saved,
    check_dout,
    check_forward,
)
from ..interop import ieee_matmul, plain_ops
from ..quant.reference import dequantize
from ..routing.gpu import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from .stages import tap

Tensor = torch.Tensor


class StagedReferenceEngine(parts.ReferenceEngine):
    """For diagnosis: stages come out one by one instead of fused; no biases. Everything else is the reference engine's."""

    def forward(
        self,
        x: Tensor,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """As the reference engine, with x_fp8, z, y1, y2, out and z_saved shown."""
        check_forward(x, routing, weights, settings)
        with plain_ops(), ieee_matmul():
            x = x.detach()
            x_rows = parts._gather_rows(_shown_operand("x_fp8", x, "x", settings, x.dtype), routing)
            z = tap("z", parts._grouped(x_rows, weights.w1, routing, transpose_weight=True))
            y1 = _shown_operand("y1", activate(z, settings.activation), "y1", settings, x.dtype)
            y2 = tap("y2", parts._round(parts._grouped(y1, weights.w2, routing, transpose_weight=True), x.dtype))
            out = tap("out", aggregate(y2, routing, weighted=True, dtype=x.dtype))
            if not save:
                return out, None
            return out, Saved(settings, routing, x, tap("z_saved", parts._save_z(z, settings, x.dtype)))

    def backward_dx(self, dout: Tensor, saved: Saved, weights: EngineWeights) -> tuple[Tensor, Tensor, PendingWgrad]:
        """As the reference engine, with dout_fp8, dy1, ds, dz, y1s, dz_fp8, dx_rows and dx shown."""
        dout = check_dout(dout, saved)
        settings, routing, x = saved.settings, saved.routing, saved.x
        assert x is not None and saved.z is not None
        with plain_ops(), ieee_matmul():
            real = (routing.row_slot >= 0).to(torch.float32).unsqueeze(-1)
            dout_rows = parts._gather_rows(_shown_operand("dout_fp8", dout, "dout", settings, dout.dtype), routing)
            dy1 = tap("dy1", parts._grouped(dout_rows, weights.w2_dgrad, routing, transpose_weight=False))
            z = parts._values(saved.z)
            y1, dz = activate_backward(z, dy1 * routing.row_prob.unsqueeze(-1), settings.activation)
            ds = tap("ds", scatter_to_slots((dy1 * y1).sum(-1), routing))
            y1, dz = y1 * real, tap("dz", dz * real)
            y1s = tap("y1s", y1 * routing.row_prob.unsqueeze(-1))
            operand = _shown_operand("dz_fp8", dz, "dz", settings, x.dtype)
            dx_rows = parts._grouped(operand, weights.w1_dgrad, routing, transpose_weight=False)
            dx_rows = tap("dx_rows", parts._round(dx_rows, x.dtype))
            dx = tap("dx", aggregate(dx_rows, routing, weighted=False, dtype=x.dtype))
            return dx, ds, PendingWgrad(settings, routing, x, dout, dz, y1s)

    def backward_dw(self, pending: PendingWgrad, accumulators: GradAccumulators) -> None:
        """As the reference engine, with both operands of dw1 and dw2 shown, and what they add up to."""
        routing, x, dout = pending.routing, pending.x, pending.dout
        dz, y1s = parts._values(pending.dz), parts._values(pending.y1s)
        assert x is not None and dout is not None
        settings = pending.settings if pending.settings.fp8_wgrad else replace(pending.settings, recipe=None)

        def shown(name: str, rows: Tensor) -> Tensor:
            return _shown_operand(name, rows, name, settings, x.dtype)

        with plain_ops(), ieee_matmul():
            left = shown("wgrad_dout", parts._gather_rows(dout, routing))
            parts._accumulate(accumulators.dw2, left, shown("wgrad_y1s", y1s), routing)
            _show_total("dw2", accumulators.dw2)
            right = shown("wgrad_x", parts._gather_rows(x, routing))
            parts._accumulate(accumulators.dw1, shown("wgrad_dz", dz), right, routing)
            _show_total("dw1", accumulators.dw1)


def _show_total(name: str, total: Tensor) -> None:
    shown = tap(name, total)
    if shown is not total:
        total.copy_(shown)


def _shown_operand(stage: str, values: Tensor, field: str, settings: EngineSettings, dtype: torch.dtype) -> Tensor:
    """fp32 values of a GEMM operand as the recipe's field quantises it, its codes shown; without a recipe rounded to `dtype`."""
    if settings.recipe is None:
        return tap(stage, parts._round(values, dtype))
    return dequantize(tap(stage, parts._quantize(values, getattr(settings.recipe, field), settings.recipe)))
