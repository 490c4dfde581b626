"""The passes of one Hopper layer: what they are given, and what is allocated for them.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..enums import ZCode
from ..interop import device_name, empty
from ..quant.format import BlockScaledTensor, Code
from ..quant.gpu import transposed
from ..routing.metadata import ROW_ALIGNMENT
from .hopper_passes import (
    Z_BLOCK,
    KeptZ,
    Passes,
    passes_on,
    token_arguments,
    z_arguments,
)
from .interface import EngineWeights
from .routed_layer import NO_OPERANDS, Operands, RoutedLayer
from .routed_passes import factors_of
from .settings import EngineSettings
from .tokens import Saved, Tokens

Tensor = torch.Tensor


LONG_Z = 1 << 24  # elements, 16 MiB in 8 bits: from here on freeing z early pays


class HopperLayer(RoutedLayer):
    """See `RoutedLayer`."""

    narrow_dtype = torch.bfloat16
    with_dgated, parts_of_b = "b", "parts_of_both"

    def _bind(
        self, anchor: Tensor, weights: EngineWeights, settings: EngineSettings, backward: bool
    ) -> tuple[Passes, Any]:
        adapters = weights.adapters
        form = settings.save_z, weights.b1 is not None, adapters is not None
        passes = passes_on(device_name(anchor), settings.activation, *form)
        # `iso_weight` does not keep backward's order.
        own = ("w1_dgrad", "w2_dgrad") if weights.two_orders else ()
        held = {name: getattr(weights, name) for name in ("w1", "w2", "b1", "b2", *own)}
        of_call = passes.kernels, torch.bfloat16, settings, backward, self._stream
        held |= factors_of(adapters, *of_call)
        return passes, passes.weights_of(held, passes.numbers(settings, adapters))

    def empty_z(self) -> KeptZ:
        shape = (self._routing.num_rows, 2 * self._weights.intermediate_size)
        if self._settings.save_z is ZCode.BF16:
            return empty(shape, torch.bfloat16, self.device)  # type: ignore[no-any-return]
        code = Code.INT8 if self._settings.save_z is ZCode.INT8 else Code.ADAPTIVE
        return BlockScaledTensor.empty(shape, Z_BLOCK, self.device, code)

    def forward(self, x: Tokens, z: KeptZ | None, out: Tensor | None) -> None:
        self._passes.forward(
            weights=self._handle,
            routing=self.routed.routing,
            stream=self._stream,
            **token_arguments("x", x),
            **z_arguments(z),
            out=out,
            # Recomputing stops at z: the down projection and its scratch are not needed.
            scratch=self.scratch("scratch", "y1_scale" if out is None else "y2"),
            up_u=self.u.up,
            down_u=self.u.down,
        )

    def goes_apart(self, saved: Saved) -> bool:
        """For backward's order of one weight, before that of the other is made, or for z. Where no
        gradient of a weight follows, z and the rows of dx take the most memory of a layer.
        """
        if self._settings.frees_stagewise or not self._weights.two_orders:
            return True
        # Two more allocations take the host's time.
        is_long = self._routing.num_rows * 2 * self._weights.intermediate_size >= LONG_Z
        return saved.donated and not saved.wants_weights and is_long

    def empty_biases(self) -> tuple[Tensor, Tensor] | None:
        # Beside unquantised weight gradients the BF16 engine sums them, of unquantised dz.
        if self._weights.b1 is None or not self._settings.fp8_wgrad:
            return None
        experts, weights = self._routing.num_experts, self._weights
        sizes = (experts, 2 * weights.intermediate_size), (experts, weights.hidden_size)
        db1, db2 = (empty(size, torch.float32, self.device) for size in sizes)
        return db1, db2

    def empty_operands(self, saved: Saved, z: KeptZ) -> Operands:
        wants_weights, adapters = saved.wants_weights, self._weights.adapters
        if not wants_weights and (adapters is None or adapters.down is None):
            return NO_OPERANDS
        # The BF16 GEMMs take rows; those of FP8 take transposed codes in a layout of their own.
        if not self._settings.fp8_wgrad:
            rows, inner = self._routing.num_rows, self._weights.intermediate_size
            sizes = (rows, 2 * inner), (rows, inner)
            dz, y1s = (empty(size, torch.bfloat16, self.device) for size in sizes)
            return dz, y1s, True
        dz = self.scratch("dz", "dz_t_scale") if wants_weights else None
        return dz, self.scratch("y1s", "y1s_t_scale"), False

    def dgated(
        self, dout: Tokens, z: KeptZ, operands: Operands, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        routing, ends, biases = self._routing, self.routed.ends, self.biases
        (dz, y1s, in_rows), apart = operands, dx is None
        size = ends["dz_scratch", "no_scales"]
        if not apart:
            size = max(ends["dz_scratch", "dout_fp8_scale"], ends["dz_scratch", "dx_rows"])
        dz_scratch = empty((size,), torch.uint8, self.device)
        dout_scratch = None
        if apart and not isinstance(dout, BlockScaledTensor):
            dout_scratch = self.scratch("dout_scratch", "dout_fp8_scale")
        dprobs = empty((routing.num_tokens, routing.topk), torch.float32, self.device)
        self._passes.dgated(
            weights=self._dgrad_order("w2") if apart else self._dgrad_order("w2", "w1"),
            routing=self.routed.routing,
            stream=self._stream,
            **token_arguments("dout", dout),
            **z_arguments(z),
            dz=None if in_rows else dz,
            y1s=None if in_rows else y1s,
            dz_rows=dz if in_rows else None,
            y1s_rows=y1s if in_rows else None,
            dprobs=dprobs,
            dz_scratch=dz_scratch,
            dout_scratch=dout_scratch,
            dx=dx,
            db1=None if biases is None else biases[0],
            db2=None if biases is None else biases[1],
            bias_parts=None if biases is None else self._bias_parts(),
            up_u=self.u.up,
            up_v=self.v.up,
            down_u=self.u.down,
            down_v=self.v.down,
            **self.db,
        )
        return dz_scratch, dprobs

    def sums_of_factors(
        self, x: Tokens, dout: Tokens, operands: Operands
    ) -> tuple[Tensor | None, ...]:
        _, y1s, in_rows = operands
        return self.sum_factors(
            **token_arguments("x", x),
            y1s=None if in_rows else y1s,
            y1s_rows=y1s if in_rows else None,
            up_v=self.v.up,
            down_v=self.v.down,
            **self.factor_gradients("a"),
        )

    def _bias_parts(self) -> Tensor:
        """Scratch of the sums of biases: of each block of rows."""
        widest = max(2 * self._weights.intermediate_size, self._weights.hidden_size)
        size = self._routing.num_rows // ROW_ALIGNMENT, widest
        return empty(size, torch.float32, self.device)  # type: ignore[no-any-return]

    def dgrad(self, dz: Tensor, x: Tokens) -> Tensor:
        dx = self.empty_dx(x)
        self._passes.dgrad(
            weights=self._dgrad_order("w1"),
            routing=self.routed.routing,
            stream=self._stream,
            dx=dx,
            dz_scratch=dz,
            dx_scratch=self.scratch("dx_scratch", "dx_rows"),
            up_v=self.v.up,
        )
        return dx

    def _dgrad_order(self, *names: str) -> Any:
        """The handle of weights whose contraction over forward's rows is contiguous."""
        # Else it is of these matrices alone, transposed for the next call.
        if self._weights.two_orders:
            return self._handle
        held = {name: getattr(self._weights, f"{name}_dgrad") for name in names}
        matrices = {f"{n}_dgrad": transposed(q) for n, q in held.items()}
        own = self._passes.kernels, torch.bfloat16, self._settings, True, self._stream
        beside = {"b2": self._weights.b2, **factors_of(self._weights.adapters, *own)}
        numbers = self._passes.numbers(self._settings, self._weights.adapters)
        return self._passes.weights_of({**matrices, **beside}, numbers)
