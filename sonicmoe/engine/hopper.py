"""The FP8 engine for Hopper: the `dx256` recipe on our own grouped GEMMs (`kernels/sm90`), gather,
activation and quantisation fused.

    forward       x_fp8          y1, z = up(x_fp8)           y2 = down(y1)     out = weighted sum per token
    backward_dx   dout_fp8       dz, y1s, dprobs = dgated(dout_fp8, z)         dx = sum per token of dgrad(dz)
    backward_dw   x^T, dout^T    dw2 += dout^T y1s           dw1 += dz^T x

Tokens are quantised once and gathered inside the GEMMs: no `[R, H]` copy of them exists.
Quantisation points, blocks and codes are those of the reference engine; results differ by the order
of additions (and dz, y1s by a rounding to bf16 on their way to FP8). Waits for nothing, allocates
by `routing.num_rows`, adds in a fixed order: equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..interop import aligned, current_stream, empty, free, plain_ops
from ..layouts import NATIVE, WeightLayout
from ..observe import tap
from ..quant.format import BlockScaledTensor
from ..quant.gpu import QuantizedWeights
from ..quant.tokens import to_bfloat16
from ..routing.metadata import RoutingMetadata
from .bf16 import Bf16Engine
from .border import check_dout, check_forward, require_operands
from .capabilities import HOPPER
from .hopper_layer import NO_FACTORS, NO_OPERANDS, HopperLayer
from .hopper_passes import Passes, token_arguments
from .interface import (
    EngineSettings,
    EngineWeights,
    GradientTargets,
    PendingWgrad,
    Saved,
    Tokens,
)
from .low_rank import NO_ROWS
from .products import write_zeros
from .quantised_engine import QuantisedEngine
from .settings import GradientMode

Tensor = torch.Tensor


class HopperEngine(QuantisedEngine):
    """See the module docstring; `capabilities.HOPPER` says what it takes."""

    name = "hopper"
    frees_dw1_first = True
    joins_codes = True

    def _empty_store(self, settings: EngineSettings) -> QuantizedWeights:
        return QuantizedWeights(settings.iso_weight)

    def in_one_order(self, settings: EngineSettings) -> EngineSettings:
        return settings.in_one_order

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Quantise, two GEMMs, a weighted gather-and-sum; `save=False` stores no z. Tokens that come
        quantised are read as they are.
        """
        check_forward(x, routing, weights, settings, HOPPER)
        with plain_ops():
            x = _aligned(x)
            layer = HopperLayer(x, routing, weights, settings)
            # The kernel writes z only where it is given memory for it.
            z = layer.empty_z() if save and not settings.recompute_z else None
            out, projected = empty(tuple(x.shape), layer.dtype, layer.device), layer.empty_narrow()
            layer.forward(x, z, out, layer.narrow(projected))
            saved = Saved(settings, routing, x, z, projected=projected) if save else None
            return tap("out", out), saved

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """Quantise dout, dgated with dprobs' sums and those of biases, dgrad, an unweighted
        gather-and-sum. A dout that comes quantised is read as it is.
        """
        dout = check_dout(dout, saved, HOPPER)
        settings, routing = saved.settings, saved.routing
        with plain_ops():
            assert saved.x is not None
            x = _aligned(saved.x)  # which may have been copied since forward
            layer = HopperLayer(x, routing, weights, settings, backward=True)
            # Paddle's `to` takes as long as five launches, also where there is nothing to cast.
            if not isinstance(dout, BlockScaledTensor) and dout.dtype != layer.dtype:
                dout = dout.to(layer.dtype)
            dout = _aligned(dout)
            z = layer.restored_z(x, saved)
            biases = layer.empty_biases() if saved.wants_biases else None
            # Two passes free memory in between: backward's order of one weight, before that of the
            # other is made, or z. Where no gradient of a weight follows, z and the rows of dx take the
            # most memory of a layer, so z goes first.
            apart = settings.frees_stagewise or not weights.two_orders
            apart |= saved.donated and not saved.wants_weights and layer.has_long_z
            dx = None if apart else layer.empty_dx(x)
            v, u, db = NO_ROWS, NO_ROWS, NO_FACTORS
            if weights.adapters is not None:
                v, u = layer.narrow(layer.empty_narrow()), layer.narrow(saved.projected)
                db = layer.factor_gradients("b")
            operands = layer.empty_operands(saved.wants_weights)
            dz_scratch, dprobs = layer.dgated(dout, z, operands, dx, biases, u, v, db)
            # Only now: where `dgated` finds no memory, the backward may be repeated.
            if saved.donated and saved.z is not None:
                _free(z)
            if settings.frees_stagewise or saved.donated:
                saved.z = None
            del z
            of_factors: Callable[[], tuple[Tensor | None, ...]] | None = None
            if weights.adapters is not None:
                of_factors = partial(layer.adapter_gradients, x, operands, v, db)
            if of_factors is not None and apart and not saved.wants_weights:
                # Computed now, because their operands are then freed before the rows of dx come.
                found = of_factors()
                of_factors, operands, db = (lambda: found), NO_OPERANDS, NO_FACTORS
            dx = tap("dx", layer.dgrad(dz_scratch, x, v) if dx is None else dx)
            pending = PendingWgrad(settings, routing, x, dout, *operands[:2])
            pending.native, pending.biases = layer.routed, biases
            pending.adapters = of_factors
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def bias_gradients(self, pending: PendingWgrad) -> tuple[Tensor, Tensor]:
        """The sums that dgated has made, of dz as dgrad read it; with `fp8_wgrad` off those of the BF16
        engine, of dz in bf16.
        """
        require_operands(pending)
        if pending.settings.fp8_wgrad:
            assert pending.biases is not None
            return pending.biases
        return Bf16Engine().bias_gradients(replace(pending, dout=_decoded(pending.dout)))

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Two GEMMs that add into the accumulators or the parameters' own memory, or write fresh
        memory, in FP8; in BF16 with `fp8_wgrad` off.
        """
        settings = pending.settings
        require_operands(pending)
        if not settings.fp8_wgrad:
            # Here and not in backward_dx: until now the tokens take half the memory.
            pending.x, pending.dout = _decoded(pending.x), _decoded(pending.dout)
            Bf16Engine().backward_dw(pending, targets)
            return
        with plain_ops():
            is_written = targets.mode is GradientMode.FRESH
            if pending.routing.num_rows == 0 and is_written:
                write_zeros(targets)  # there is nothing to launch
                return
            biases = self.bias_gradients(pending) if targets.has_biases else None
            passes = pending.native.passes
            both = targets.up.first is not None and targets.down.first is not None
            # Both at once take two launches fewer, and memory for the operands of both. Fresh
            # memory of gradients is there besides.
            apart = settings.frees_stagewise or is_written or not both
            add = _add_one_by_one if apart else _add_both
            add(passes, pending, targets, passes.gradients(targets))
            if biases is not None:
                targets.adding = True
                targets.add_biases(*biases, split_half=False)
                targets.adding = False
        pending.x = pending.dout = pending.dz = pending.y1s = pending.biases = None

    def writes_gradients(self, settings: EngineSettings, device: str) -> bool:
        """Not with `fp8_wgrad` off: the BF16 GEMMs compute them then, from dz with gate and up in turns,
        and cannot write gradients that hold all gates first.
        """
        return settings.fp8_wgrad

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        """Why the copy engine, or with `fp8_wgrad` off the BF16 GEMMs, cannot add there, or None."""
        if not settings.fp8_wgrad:
            return Bf16Engine().problem_of(targets, settings)  # dz is in the native order
        return targets.copy_engine_problem()


def _decoded(tokens: Tokens | None) -> Tokens | None:
    return to_bfloat16(tokens) if isinstance(tokens, BlockScaledTensor) else tokens


def _free(z: Tensor | BlockScaledTensor) -> None:
    """Give the memory of a donated z back, whoever holds the tensors: autograd does, to the end of the
    backward. A part of a larger buffer stays: a hook of saved tensors may have put it there.
    """
    for part in (z.bytes, z.scale_inv) if isinstance(z, BlockScaledTensor) else (z,):
        free(part)


def _aligned(x: Tokens) -> Tokens:
    if not isinstance(x, BlockScaledTensor):
        return aligned(x, detached=False)  # type: ignore[no-any-return]
    codes, scale_inv = aligned(x.codes), aligned(x.scale_inv)
    if codes is x.codes and scale_inv is x.scale_inv:
        return x
    return replace(x, codes=codes, scale_inv=scale_inv)


def _launch_of(pending: PendingWgrad) -> dict[str, Any]:
    """The arguments that all passes of these weight gradients share."""
    # They keep no operand alive.
    return {
        "routing": pending.native.routing,
        # Not the layer's: weight gradients that are put off may run on another stream.
        "stream": current_stream(pending.dz),
        "multiprocessors": pending.settings.gemm_num_sms,
    }


def _add_both(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any]
) -> None:
    """Both weight gradients."""
    launch, native = _launch_of(pending), pending.native
    memory = empty((native.ends["wgrad_scratch", "dout_t_scale"],), torch.uint8, native.device)
    targets.adding = True
    passes.wgrad(
        **launch,
        **token_arguments("x", pending.x),
        **token_arguments("dout", pending.dout),
        **gradients,
        dz=pending.dz,
        y1s=pending.y1s,
        wgrad_scratch=memory,
    )
    targets.adding = False


def _add_one_by_one(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any]
) -> None:
    """Both weight gradients, one product after the other: each frees its operands before the next
    begins, so that the other's need not lie beside its own.
    """
    # A product that nobody wants is left out.
    native, launch = pending.native, _launch_of(pending)
    # One scratch serves both products. The second must not have to ask for memory when the first
    # has been added already.
    memory = empty((native.ends["dw_scratch", "x_t_scale"],), torch.uint8, native.device)
    targets.adding = True
    is_late = targets.make_down is not None
    if not is_late:
        _add_dw2(passes, pending, targets, gradients, launch, memory)
    _add_dw1(passes, pending, targets, gradients, launch, memory)
    if is_late:
        # dz is larger than y1s, and its memory is free for dw2.
        targets.take_down()
        _add_dw2(passes, pending, targets, passes.gradients(targets), launch, memory)
    targets.adding = False


def _add_dw1(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any],
    launch: dict[str, Any], scratch: Tensor,
) -> None:  # fmt: skip
    x, dz = pending.x, pending.dz
    pending.x = pending.dz = None
    if targets.wants("dw1"):
        into = {"dw1": gradients["dw1"]}
        passes.dw1(**launch, **token_arguments("x", x), **into, dz=dz, dw_scratch=scratch)


def _add_dw2(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any],
    launch: dict[str, Any], scratch: Tensor,
) -> None:  # fmt: skip
    dout, y1s = pending.dout, pending.y1s
    pending.dout = pending.y1s = None
    if targets.wants("dw2"):
        into = {"dw2": gradients["dw2"]}
        passes.dw2(**launch, **token_arguments("dout", dout), **into, y1s=y1s, dw_scratch=scratch)
