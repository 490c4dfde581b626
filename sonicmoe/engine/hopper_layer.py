"""The passes of one Hopper layer, and what their arguments share.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..enums import ZCode
from ..interop import current_stream, device_name, empty
from ..quant.format import BlockScaledTensor, Code
from ..quant.gpu import transposed
from ..routing.metadata import ROW_ALIGNMENT, RoutingMetadata
from .hopper_passes import (
    Z_BLOCK,
    KeptZ,
    factors_of,
    passes_on,
    prepared_handle,
    token_arguments,
    z_arguments,
)
from .interface import EngineWeights
from .low_rank import NO_ROWS, Narrow
from .settings import EngineSettings
from .tokens import Saved, Tokens

Tensor = torch.Tensor


LONG_Z = 1 << 24  # elements, 16 MiB in 8 bits: from here on freeing z early pays
NO_FACTORS: Mapping[str, Tensor | None] = dict.fromkeys(("d_up_b", "d_down_b", "parts"))


# dz and y1s as wgrad reads them, each None where nobody will read it; and whether they are bf16 rows
# instead of transposed codes with their scales. A plain tuple, because every backward makes one and
# creating an object takes the host longer.
Operands = tuple[Tensor | None, Tensor | None, bool]
NO_OPERANDS: Operands = (None, None, False)


class HopperLayer:
    """The passes of one forward, or of one backward to the tokens, and what their arguments share.

    Holds handles of the routing and the weights, which the caller holds anyway, and no activation:
    what stage-wise memory frees between two passes is free.

    dtype, device: of out and dx; the dtype is `token_dtype` of the tokens.
    """

    def __init__(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        backward: bool = False,
    ) -> None:
        # Asked once a layer: device and stream of a tensor cost the host as much as a launch.
        if isinstance(x, BlockScaledTensor):
            anchor, self.dtype = x.codes, torch.bfloat16
        else:
            anchor, self.dtype = x, x.dtype
        self._stream = current_stream(anchor)
        prepared = weights.native
        if prepared is not None and weights.adapters is not None:
            same = prepared.adapters is weights.adapters and prepared.of_backward is backward
            prepared = prepared if same else None
        if prepared is None or prepared.settings is not settings:
            has = weights.b1 is not None, weights.adapters is not None
            form = settings.save_z, *has
            passes = passes_on(device_name(anchor), settings.activation, *form)
            prepared = prepared_handle(passes, weights, settings, backward, self._stream)
        self._prepared, self._passes = prepared, prepared.passes
        self.routed = self._passes.routed(routing, prepared.hidden, prepared.inner)
        self.device = self.routed.device
        self._routing, self._weights, self._settings = routing, weights, settings

    def empty_z(self) -> KeptZ:
        """Unwritten `[R, 2I]`."""
        shape = (self._routing.num_rows, 2 * self._prepared.inner)
        if self._settings.save_z is ZCode.BF16:
            return empty(shape, torch.bfloat16, self.device)  # type: ignore[no-any-return]
        code = Code.INT8 if self._settings.save_z is ZCode.INT8 else Code.ADAPTIVE
        return BlockScaledTensor.empty(shape, Z_BLOCK, self.device, code)

    def restored_z(self, x: Tokens, saved: Saved) -> KeptZ:
        """z as forward stored it, or computed again to the same bits."""
        # The same kernel on the same codes gives the same bits, so nothing depends on the mode.
        if saved.z is None:
            z = self.empty_z()
            self.forward(x, z, None, self.narrow(saved.projected))
            return z
        return saved.z

    def empty_narrow(self) -> Tensor | None:
        """Memory of a `Narrow`, unwritten; None without adapters."""
        adapters = self._weights.adapters
        if adapters is None:
            return None
        return empty(  # type: ignore[no-any-return]
            (self._routing.num_rows, sum(adapters.widths)), torch.bfloat16, self.device
        )

    def narrow(self, memory: Tensor | None) -> Narrow:
        """What lies in such memory."""
        adapters = self._weights.adapters
        return Narrow() if adapters is None else Narrow.within(memory, adapters.widths)

    def forward(self, x: Tokens, z: KeptZ | None, out: Tensor | None, u: Narrow = NO_ROWS) -> None:
        """Fills what there is of z `[R, 2I]`, out `[T, H]` and u."""
        # Recomputing stops at z: the down projection and its scratch are not needed.
        size = self.routed.ends["scratch", "y1_scale" if out is None else "y2"]
        self._passes.forward(
            weights=self._prepared.handle,
            routing=self.routed.routing,
            stream=self._stream,
            **token_arguments("x", x),
            **z_arguments(z),
            out=out,
            scratch=empty((size,), torch.uint8, self.device),
            up_u=u.up,
            down_u=u.down,
        )

    @property
    def has_long_z(self) -> bool:
        """Whether z is so large that freeing it before dgrad is worth two more allocations, which take
        the host's time.
        """
        return self._routing.num_rows * 2 * self._prepared.inner >= LONG_Z

    def empty_biases(self) -> tuple[Tensor, Tensor] | None:
        """Unwritten db1 `[E, 2I]` and db2 `[E, H]`, where dgated sums them."""
        # Beside unquantised weight gradients the BF16 engine sums them, of unquantised dz.
        if self._weights.b1 is None or not self._settings.fp8_wgrad:
            return None
        experts, hidden, inner = (
            self._routing.num_experts,
            self._prepared.hidden,
            self._prepared.inner,
        )
        sizes = (experts, 2 * inner), (experts, hidden)
        db1, db2 = (empty(size, torch.float32, self.device) for size in sizes)
        return db1, db2

    def empty_dx(self, x: Tokens) -> Tensor:
        """Unwritten `[T, H]`."""
        return empty(tuple(x.shape), self.dtype, self.device)  # type: ignore[no-any-return]

    def empty_operands(self, wants_weights: bool) -> Operands:
        """Unwritten. wants_weights: whether gradients of weights will be asked for."""
        adapters, ends = self._weights.adapters, self.routed.ends
        if not wants_weights and (adapters is None or adapters.down is None):
            return NO_OPERANDS
        # The BF16 GEMMs take rows; those of FP8 take transposed codes in a layout of their own.
        if not self._settings.fp8_wgrad:
            rows, inner = self._routing.num_rows, self._prepared.inner
            sizes = (rows, 2 * inner), (rows, inner)
            dz, y1s = (empty(size, torch.bfloat16, self.device) for size in sizes)
            return dz, y1s, True
        codes = ends["dz", "dz_t_scale"], ends["y1s", "y1s_t_scale"]
        dz = empty((codes[0],), torch.uint8, self.device) if wants_weights else None
        return dz, empty((codes[1],), torch.uint8, self.device), False

    def dgated(
        self,
        dout: Tokens,
        z: KeptZ,
        operands: Operands,
        dx: Tensor | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        u: Narrow = NO_ROWS,
        v: Narrow = NO_ROWS,
        db: Mapping[str, Tensor | None] = NO_FACTORS,
    ) -> tuple[Tensor, Tensor]:
        """`(scratch that holds dz, dprobs [T, K])`. Fills the operands of wgrad.

        dx: filled at once, where nothing is to be freed before `dgrad`. That takes fewer allocations.
        biases: db1 and db2, filled.
        u, v: of adapters; v is filled.
        db: `factor_gradients("b")`, filled.
        """
        routing, ends, device = self._routing, self.routed.ends, self.device
        (dz, y1s, in_rows), apart = operands, dx is None
        size = ends["dz_scratch", "no_scales"]
        if not apart:
            size = max(ends["dz_scratch", "dout_fp8_scale"], ends["dz_scratch", "dx_rows"])
        dz_scratch = empty((size,), torch.uint8, device)
        dout_scratch = None
        if apart and not isinstance(dout, BlockScaledTensor):
            dout_scratch = empty((ends["dout_scratch", "dout_fp8_scale"],), torch.uint8, device)
        dprobs = empty((routing.num_tokens, routing.topk), torch.float32, device)
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
            up_u=u.up,
            up_v=v.up,
            down_u=u.down,
            down_v=v.down,
            **db,
        )
        return dz_scratch, dprobs

    def factor_gradients(self, name: str) -> dict[str, Tensor | None]:
        """Allocate `d_up_<name>` and `d_down_<name>`, fp32 gradients in the strides of the factors,
        and `parts`, scratch for the larger sum: arguments of the passes.
        """
        adapters, routing, passes = self._weights.adapters, self._routing, self._passes
        found: dict[str, Tensor | None] = {f"d_up_{name}": None, f"d_down_{name}": None}
        wide, parts_of = (2, "gradient_parts") if name == "a" else (1, "parts_of_both")
        size = 0
        for side, pair in () if adapters is None else zip(adapters._fields, adapters, strict=True):
            if pair is not None:
                factor = getattr(pair, name)
                found[f"d_{side}_{name}"] = torch.empty_like(factor, dtype=torch.float32)
                sizes = routing.num_rows, routing.num_experts, factor.shape[wide], pair.width
                size = max(size, int(passes.kernels[parts_of](*sizes, factor.shape[3 - wide])))
        return {**found, "parts": empty((size,), torch.float32, self.device) if size else None}

    def adapter_gradients(
        self, x: Tokens, operands: Operands, v: Narrow, db: Mapping[str, Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """`PendingWgrad.adapters`. operands, v, db: as `dgated` of this backward has filled them."""
        (_, y1s, in_rows), of_a = operands, self.factor_gradients("a")
        found = of_a["d_up_a"], db["d_up_b"], of_a["d_down_a"], db["d_down_b"]
        if self._routing.num_rows == 0:
            return tuple([None if each is None else each.zero_() for each in found])
        self._passes.adapters(
            routing=self.routed.routing,
            stream=current_stream(self._routing.held[0]),
            **token_arguments("x", x),
            y1s=None if in_rows else y1s,
            y1s_rows=y1s if in_rows else None,
            up_v=v.up,
            down_v=v.down,
            **of_a,
        )
        return found

    def _bias_parts(self) -> Tensor:
        """Scratch of the sums of biases: of each block of rows."""
        widest = max(2 * self._prepared.inner, self._prepared.hidden)
        size = self._routing.num_rows // ROW_ALIGNMENT, widest
        return empty(size, torch.float32, self.device)  # type: ignore[no-any-return]

    def dgrad(self, dz_scratch: Tensor, x: Tokens, v: Narrow = NO_ROWS) -> Tensor:
        """dx `[T, H]`, from the scratch and the v that `dgated` left."""
        dx = self.empty_dx(x)
        self._passes.dgrad(
            weights=self._dgrad_order("w1"),
            routing=self.routed.routing,
            stream=self._stream,
            dx=dx,
            dz_scratch=dz_scratch,
            dx_scratch=empty(
                (self.routed.ends["dx_scratch", "dx_rows"],), torch.uint8, self.device
            ),
            up_v=v.up,
        )
        return dx

    def _dgrad_order(self, *names: str) -> Any:
        """The handle of weights whose contraction over forward's rows is contiguous."""
        # Else it is of these matrices alone, transposed for the next call.
        if self._prepared.has_dgrad:
            return self._prepared.handle
        held = {name: getattr(self._weights, f"{name}_dgrad") for name in names}
        matrices = {f"{n}_dgrad": transposed(q) for n, q in held.items()}
        own = self._passes, self._settings, True, self._stream
        beside = {"b2": self._weights.b2, **factors_of(self._weights.adapters, *own)}
        numbers = self._passes.numbers(self._settings, self._weights.adapters)
        return self._passes.weights_of({**matrices, **beside}, numbers)
