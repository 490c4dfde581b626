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

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..interop import current_stream, empty, plain_ops
from ..layouts import NATIVE, WeightLayout
from ..quant.format import BlockScaledTensor
from ..quant.gpu import QuantizedWeights
from ..quant.tokens import to_bfloat16
from .bf16 import Bf16Engine
from .border import require_operands
from .hopper_layer import HopperLayer
from .hopper_passes import token_arguments
from .products import write_zeros
from .quantised_engine import QuantisedEngine
from .routed_layer import RoutedEngine, add_products
from .settings import EngineSettings, GradientMode
from .targets import GradientTargets
from .tokens import PendingWgrad, Tokens

Tensor = torch.Tensor


class HopperEngine(RoutedEngine, QuantisedEngine):
    """See the module docstring; `capabilities.HOPPER` says what it takes."""

    name = "hopper"
    frees_dw1_first = True
    joins_codes = True
    layer = HopperLayer

    def _empty_store(self, settings: EngineSettings) -> QuantizedWeights:
        return QuantizedWeights(settings.iso_weight)

    def in_one_order(self, settings: EngineSettings) -> EngineSettings:
        return settings.in_one_order

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
            # Both at once take two launches fewer, and memory for the operands of both. Fresh
            # memory of gradients is there besides.
            both = targets.up.first is not None and targets.down.first is not None
            _add(pending, targets, settings.frees_stagewise or is_written or not both, biases)
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


def _add(
    pending: PendingWgrad,
    targets: GradientTargets,
    one_by_one: bool,
    biases: tuple[Tensor, Tensor] | None,
) -> None:
    """See `add_products`."""
    passes, native = pending.native.passes, pending.native
    # One scratch serves both products. The second must not have to ask for memory when the first
    # has been added already.
    buffer, last = ("dw_scratch", "x_t_scale") if one_by_one else ("wgrad_scratch", "dout_t_scale")
    scratch = empty((native.ends[buffer, last],), torch.uint8, native.device)
    # Not the layer's: weight gradients that are put off may run on another stream.
    stream, multiprocessors = current_stream(pending.dz), pending.settings.gemm_num_sms

    def launch(dw1: Any, dw2: Any) -> None:
        passes.wgrad(
            routing=native.routing,
            stream=stream,
            multiprocessors=multiprocessors,
            **token_arguments("x", None if dw1 is None else pending.x),
            **token_arguments("dout", None if dw2 is None else pending.dout),
            dz=pending.dz,
            y1s=pending.y1s,
            dw1=dw1,
            dw2=dw2,
            wgrad_scratch=None if one_by_one else scratch,
            dw_scratch=scratch if one_by_one else None,
        )

    add_products(pending, targets, partial(passes.gradients, targets), launch, one_by_one, biases)
