"""The reference engine: plain tensor operations on any device, fp32 compute, exact emulation of the
FP8 recipe.

It is the executable specification of every GPU engine (same quantisation points, same scales, same
codes; results differ by the order of fp32 additions only), the golden of their tests, and the
engine that runs where no GPU kernel does.

Where a GPU engine stores a row tensor in the dtype of the tokens (y2, dx rows; y1, z, dz without
FP8) this one rounds to it too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..interop import ieee_matmul, plain_ops
from ..observe import is_heard, tap
from ..quant.format import BlockScaledTensor
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from .activations import activate, activate_backward
from .border import check_dout, check_forward, check_weights, require_operands
from .capabilities import REFERENCE
from .interface import (
    Engine,
    EngineSettings,
    EngineWeights,
    GradientTargets,
    PendingWgrad,
    Saved,
    Tokens,
    token_dtype,
)
from .low_rank import Adapters
from .reference_operands import (
    NarrowProducts,
    experts_with_rows,
    gather_rows,
    grouped,
    narrow_products,
    operand,
    quantize_operand,
    rounded,
    saved_z,
    token_rows,
    values_of,
    wgrad_operands,
)

Tensor = torch.Tensor


class ReferenceEngine(Engine):
    """See the module docstring. Bit-exact run to run on one machine; waits for the device, so not
    for production on GPUs.
    """

    name = "reference"
    joins_codes = True

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """Quantise native weights once; without a recipe, keep them."""
        check_weights(w1, w2, b1, b2, settings.activation)
        with plain_ops():
            # Without one the user's tensors are read as they lie, and nothing is copied.
            recipe = settings.recipe
            if recipe is None:
                return EngineWeights(
                    w1.detach(), w2.detach(), w1.detach(), w2.detach(), _fp32(b1), _fp32(b2)
                )
            w1_forward = quantize_operand(w1, recipe.w1, recipe)
            w2_forward = quantize_operand(w2, recipe.w2, recipe)
            # Square blocks serve both directions, and the same object then says so. Other blocks
            # run along the contracted axis, which dgrad exchanges, so the weight is quantised a
            # second time.
            w1_dgrad, w2_dgrad = w1_forward, w2_forward
            if recipe.w1_dgrad != recipe.w1:
                w1_dgrad = quantize_operand(w1, recipe.w1_dgrad, recipe)
            if recipe.w2_dgrad != recipe.w2:
                w2_dgrad = quantize_operand(w2, recipe.w2_dgrad, recipe)
            return EngineWeights(w1_forward, w2_forward, w1_dgrad, w2_dgrad, _fp32(b1), _fp32(b2))

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Up-projection, activation, down-projection per expert; then a weighted gather-and-sum per
        token.
        """
        check_forward(x, routing, weights, settings, REFERENCE)
        with plain_ops(), ieee_matmul():
            # Autograd is the bridge's affair: a graph in here would keep every intermediate.
            x, dtype = _detached(x), token_dtype(x)
            up, down = narrow_products(weights, routing, x)
            # fp32 until the activation: rounding z first would round y1 twice.
            z, of_up = _up_projection(x, routing, weights, settings, up)
            z = tap("z", z)
            y1 = activate(z, settings.activation, settings.activation_parameters)
            y1 = operand(y1, "y1", settings, dtype)
            # The probability is applied in the sum per token and not here: y2 is rounded to the
            # dtype of the tokens before the weighting, as in the GPU engines.
            y2 = grouped(y1, weights.w2, routing, transpose_weight=True, bias=weights.b2)
            of_down = None
            if down is not None:
                of_down, added = down.forward(y1)
                y2 += added
            y2 = tap("y2", rounded(y2, dtype))
            out = tap("out", aggregate(y2, routing, weighted=True, dtype=dtype))
            if not save:
                return out, None
            kept = None if settings.recompute_z else tap("z_saved", saved_z(z, settings, dtype))
            projected = [u.to(dtype) for u in (of_up, of_down) if u is not None]
            beside = torch.cat(projected, 1) if projected else None
            return out, Saved(settings, routing, x, kept, projected=beside)

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """dgated (dout x W2, activation backward, dprobs), then dgrad (dz x W1), then an unweighted
        gather-and-sum per token.
        """
        dout = check_dout(dout, saved, REFERENCE)
        with plain_ops(), ieee_matmul():
            settings, routing, x = saved.settings, saved.routing, saved.x
            assert x is not None
            dtype = token_dtype(x)
            # Backward computes with the decoded z and not with the exact one. y1 and dz then belong
            # to one pre-activation, and recomputing gives the same bits as storing.
            z = self._restore_z(saved, weights)
            # Drops the codes. The decoded z goes with the `del` below, before the dx product needs
            # memory.
            if settings.frees_stagewise:
                saved.z = None
            up, down = narrow_products(weights, routing, x)
            y1, dz, row_dprob, of_down = _dgated(dout, z, routing, weights, settings, down)
            dprobs = tap("ds", scatter_to_slots(row_dprob, routing))
            y1s = y1 * routing.row_prob.unsqueeze(-1)
            if settings.recipe is not None and settings.recipe.rounds_rows:
                dz, y1s = rounded(dz, dtype), rounded(y1s, dtype)
            dz = tap("dz", dz)
            # y1s = p * y1 is made here, because dw2 = dout^T y1s needs the probability and y1 is
            # freed.
            y1s = tap("y1s", y1s)
            del z, y1
            dz_operand = operand(dz, "dz", settings, dtype)
            biases = None
            # The codes of dz are all that an engine in FP8 has of it.
            in_fp8 = settings.recipe is not None and settings.fp8_wgrad
            if weights.b1 is not None and in_fp8 and saved.wants_biases:
                biases = _sums_of_rows(dz_operand, routing), _db2(dout, routing)
            dx_rows = grouped(dz_operand, weights.w1_dgrad, routing, transpose_weight=False)
            of_up: tuple[Any, ...] = ()
            if up is not None:
                v_up, added = up.backward(dz_operand)
                dx_rows += added
                of_up = x, v_up, dz_operand
            del dz_operand
            dx_rows = tap("dx_rows", rounded(dx_rows, dtype))
            dx = tap("dx", aggregate(dx_rows, routing, weighted=False, dtype=dtype))
            # dz goes on unquantised: the recipe of wgrad may have other blocks, along the rows.
            pending = PendingWgrad(settings, routing, x, dout, dz, y1s, biases=biases)
            if weights.adapters is not None and saved.projected is not None:
                operands = of_up, (y1s, *of_down), saved.projected
                pending.adapters = partial(
                    _adapter_gradients, weights.adapters, (up, down), operands, routing
                )
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def bias_gradients(self, pending: PendingWgrad) -> tuple[Tensor, Tensor]:
        """The sums of dz as dgrad read it, or of exact dz where weight gradients are not in FP8."""
        require_operands(pending)
        if pending.biases is not None:
            return pending.biases
        with plain_ops():
            assert pending.dout is not None
            routing = pending.routing
            return _sums_of_rows(pending.dz, routing), _db2(pending.dout, routing)

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """dw2 += dout^T y1s, then dw1 += dz^T x, per expert, fp32."""
        settings, routing = pending.settings, pending.routing
        require_operands(pending)
        x, dout, dz, y1s = pending.x, pending.dout, pending.dz, pending.y1s
        assert x is not None and dout is not None
        with plain_ops(), ieee_matmul():
            # Every product is made before the first is added: who runs out of memory in between
            # must find the sums as they were.
            of_biases = self.bias_gradients(pending) if targets.has_biases else None
            products = []
            # dw2 before dw1, each with its own gather: the rows of dout are freed before those of x
            # are made, so the two never exist together.
            dtype = token_dtype(x)
            left, right = wgrad_operands(("dout", dout), ("y1s", y1s), routing, settings, dtype)
            products += [("dw2", _products(left, right, routing, targets, "dw2"))]
            del left, right, dout, y1s
            if settings.frees_stagewise:
                pending.dout = pending.y1s = None
            right, left = wgrad_operands(("x", x), ("dz", dz), routing, settings, dtype)
            products += [("dw1", _products(left, right, routing, targets, "dw1"))]
            targets.adding = True
            if of_biases is not None:
                targets.add_biases(*of_biases, split_half=False)
            for name, of_experts in products:
                for expert, product in of_experts:
                    targets.add(name, expert, product)
            _show_total("dw2", targets)
            _show_total("dw1", targets)
            targets.adding = False
            pending.x = pending.dout = pending.dz = pending.y1s = pending.biases = None

    def _restore_z(self, saved: Saved, weights: EngineWeights) -> Tensor:
        """fp32 z as backward reads it."""
        assert saved.x is not None
        kept = saved.z
        if kept is None:
            up, _ = narrow_products(weights, saved.routing, saved.x)
            z, _ = _up_projection(saved.x, saved.routing, weights, saved.settings, up)
            # A recomputed z takes the way through the codes too; without it the two modes would
            # differ.
            kept = saved_z(z, saved.settings, token_dtype(saved.x))
        return values_of(kept)


def _adapter_gradients(
    adapters: Adapters,
    products: tuple[NarrowProducts | None, NarrowProducts | None],
    operands: tuple[Any, Any, Tensor],
    routing: RoutingMetadata,
) -> tuple[Tensor | None, ...]:
    """`PendingWgrad.adapters`; x and y1s are read as they are, dout and dz as the GEMMs read them."""
    (up, down), (of_up, of_down, projected) = products, operands
    found: list[Tensor | None] = [None] * 4
    with plain_ops(), ieee_matmul():
        u = projected.to(torch.float32)
        if up is not None:
            x, v, dz = of_up
            found[:2] = up.gradients(gather_rows(values_of(x), routing), v, dz, u[:, : up.width])
        if down is not None:
            y1s, v, dout = of_down
            # out = sum p y2: the gradient of a row of y2 is p dout, and y1s has the p of y1.
            weighted = u[:, -down.width :] * routing.row_prob.unsqueeze(-1)
            found[2:] = down.gradients(y1s, v, dout, weighted)
    return adapters.cut(found)


def _up_projection(
    x: Tokens,
    routing: RoutingMetadata,
    weights: EngineWeights,
    settings: EngineSettings,
    adapter: NarrowProducts | None,
) -> tuple[Tensor, Tensor | None]:
    """fp32 `z [R, N1]`, whose padding rows are zero, and u of the adapter."""
    rows = token_rows(x, "x", routing, settings)
    z = grouped(rows, weights.w1, routing, transpose_weight=True, bias=weights.b1)
    if adapter is None:
        return z, None
    u, added = adapter.forward(rows)
    return z + added, u


def _dgated(
    dout: Tokens,
    z: Tensor,
    routing: RoutingMetadata,
    weights: EngineWeights,
    settings: EngineSettings,
    adapter: NarrowProducts | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """`(y1 [R, I], dz [R, N1], row_dprob [R])` with `row_dprob = <dy1, y1> + <dout, b2>` before
    weighting by the probability; and of the adapter v, unweighted too, and dout's rows.
    """
    dout_rows = token_rows(dout, "dout", routing, settings)
    # Unweighted: dprobs = <dy1, y1> needs the gradient before the probability is multiplied in.
    dy1 = grouped(dout_rows, weights.w2_dgrad, routing, transpose_weight=False)
    of_adapter: tuple[Tensor, ...] = ()
    if adapter is not None:
        v, added = adapter.backward(dout_rows)
        dy1 += added
        of_adapter = v, dout_rows
    dy1 = tap("dy1", dy1)
    weighted, own = dy1 * routing.row_prob.unsqueeze(-1), settings.activation_parameters
    y1, dz = activate_backward(z, weighted, settings.activation, own)
    del weighted
    # With the decoded z, as every other gradient.
    row_dprob = (dy1 * y1).sum(-1)
    if weights.b2 is not None:
        # The bias is not quantised, and so dout is not either in this product.
        exact = gather_rows(values_of(dout), routing)
        for expert, first, count, _ in experts_with_rows(routing):
            row_dprob[first : first + count] = (
                row_dprob[first : first + count] + exact[first : first + count] @ weights.b2[expert]
            )
    # Padding rows of y1 and dz must be finite zeros, because a GPU engine's weight gradients read
    # whole tiles, and this engine defines their operands.
    real = (routing.row_token >= 0).to(torch.float32).unsqueeze(-1)
    return y1 * real, dz * real, row_dprob, of_adapter


def _products(
    left: Tensor, right: Tensor, routing: RoutingMetadata, targets: GradientTargets, name: str
) -> list[tuple[int, Tensor]]:
    """`left_e^T right_e` over the true rows of every expert that has any, as the targets take them;
    none where nobody wants them.
    """
    if not targets.wants(name):
        return []
    return [
        (expert, targets.arranged(name, left[rows].transpose(0, 1) @ right[rows]))
        for expert, rows in _true_rows(routing)
    ]


def _show_total(name: str, targets: GradientTargets) -> None:
    """`tap` of sums that are added to in place: the tensor that a listener returns replaces them."""
    # A copy of all gradients is made for listeners only.
    sums = targets.sums(name) if is_heard() else None
    if sums is not None:
        shown = tap(name, sums)
        if shown is not sums:
            targets.replace(name, shown)


def _db2(dout: Tokens, routing: RoutingMetadata) -> Tensor:
    """`[E, H]`."""
    # Weighted by p, because out = sum p * (y2 + b2). What is not quantised for a product is not
    # quantised here.
    weighted = gather_rows(values_of(dout), routing) * routing.row_prob.unsqueeze(-1)
    return _sums_of_rows(weighted, routing)


def _sums_of_rows(rows: Tensor, routing: RoutingMetadata) -> Tensor:
    """`[E, N]`: over the true rows of every expert."""
    sums = torch.zeros((routing.num_experts, int(rows.shape[1])), device=rows.device)
    for expert, true in _true_rows(routing):
        sums[expert] = rows[true].sum(0)
    return sums


def _true_rows(routing: RoutingMetadata) -> list[tuple[int, slice]]:
    return [
        (expert, slice(first, first + count))
        for expert, first, count, _ in experts_with_rows(routing)
    ]


def _detached(x: Tokens) -> Tokens:
    return x if isinstance(x, BlockScaledTensor) else x.detach()


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32)
