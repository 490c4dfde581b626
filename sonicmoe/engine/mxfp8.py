"""The MXFP8 engine for Blackwell: recipe `iso32-pow2` on the block-scaled grouped GEMMs of
`kernels.mx_gemm`, operands quantised by kernels of ours (`quant.mx`).

    forward       x_fp8 in expert order      y1, z = up(x_fp8)          y2 = down(y1)    out = weighted sum per token
    backward_dx   dout_fp8 in expert order   dz, y1s, dprobs = dgated(dout_fp8, z)       dz_fp8, y1s_fp8
                  dx = sum per token of dgrad(dz_fp8)
    backward_dw   x_fp8 again                dw2 += dout_fp8^T y1s_fp8                   dw1 += dz_fp8^T x_fp8

Compiled, and never run on a GPU of its architectures by this project: chosen by name only. One set
of codes serves both contractions of an operand. x is quantised again in backward instead of kept:
that costs a launch, and its codes, R x H bytes, live in no other pass.

Quantisation points, blocks and codes are those of the reference engine; results differ by the order
of additions. y1's scale comes from its largest value times the rounded reciprocal of 448, so it may be
the next power of two where the quotient is one, and an infinite element of y1 is NaN alone instead
of with its block. Waits for nothing, allocates by `routing.num_rows`, adds in a fixed order: equal
calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..interop import aligned, device_name, device_of, empty, plain_ops
from ..kernels.mx_gemm import MxGemms, MxShape, Pair, mx_gemms
from ..observe import stage, tap
from ..quant import mx
from ..quant.gpu import QuantizedWeights
from ..quant.mx import MxTensor, MxWeights
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from . import bf16_gradients
from .bf16 import Bf16Engine, ExpertRows, launch_scope
from .bf16_gradients import Destinations
from .border import check_dout, check_forward, require_operands
from .capabilities import MXFP8
from .gpu import gpu_of
from .interface import (
    EngineSettings,
    EngineWeights,
    GradientTargets,
    ParameterTargets,
    PendingWgrad,
    Saved,
    Tokens,
    plain_tokens,
)
from .quantised_engine import QuantisedEngine

Tensor = torch.Tensor
_GEMMS = "MXFP8"


class Mxfp8Engine(QuantisedEngine):
    """See the module docstring; `capabilities.MXFP8` says what it takes."""

    name = "mxfp8"

    def _empty_store(self, settings: EngineSettings) -> QuantizedWeights:
        return MxWeights()

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Quantise, two GEMMs, a weighted gather-and-sum; `save=False` writes no z."""
        check_forward(x, routing, weights, settings, MXFP8)
        with plain_ops():
            tokens: Tensor = aligned(plain_tokens(x))
            keeps_z = save and not settings.recompute_z
            layer = _Layer(tokens, routing, weights, settings)
            z = layer.rows(layer.n1) if keeps_z else None
            if routing.num_rows == 0:
                out = torch.zeros(tuple(x.shape), dtype=tokens.dtype, device=tokens.device)
                return out, Saved(settings, routing, tokens, z) if save else None
            # Without an operand of wgrad to come, nobody contracts these over the rows.
            x_rows = layer.quantised("x", tokens, along_rows=False)
            y1, y2 = layer.empty_y1(), layer.rows(weights.hidden_size)
            with _launches(tokens, settings, routing) as (gemms, rows):
                with stage("up"):
                    up = _along_columns(x_rows), _along_columns(weights.w1)
                    gemms.up(*up, z, _along_columns(y1), rows.cu_rows)
                del x_rows, up
                z = None if z is None else tap("z", z)
                y1 = _shown("y1", y1)
                with stage("down"):
                    gemms.down(_along_columns(y1), _along_columns(weights.w2), y2, rows.cu_rows)
            with stage("aggregate_out"):
                out = tap("out", aggregate(tap("y2", y2), routing, weighted=True))
            return out, Saved(settings, routing, tokens, z) if save else None

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """Quantise dout, dgated with dprobs' row sums, quantise dz and y1s, dgrad, an unweighted
        gather-and-sum.
        """
        dout = check_dout(dout, saved, MXFP8)
        settings, routing, x = saved.settings, saved.routing, plain_tokens(saved.x)
        with plain_ops():
            gradient: Tensor = aligned(plain_tokens(dout).to(x.dtype))
            layer = _Layer(x, routing, weights, settings)
            dz, y1s = layer.rows(layer.n1), layer.rows(layer.inner)
            pending = PendingWgrad(settings, routing, x, gradient, dz, y1s)
            if routing.num_rows == 0:
                dx = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                shape = (routing.num_tokens, routing.topk)
                dprobs = torch.zeros(shape, dtype=torch.float32, device=x.device)
            else:
                with _launches(x, settings, routing) as (gemms, rows):
                    dx, dprobs = layer.backward_dx(gradient, saved, pending, gemms, rows)
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """A GEMM for each projection that anybody wants the gradient of; with `fp8_wgrad` off those
        of the BF16 engine.

        Raises:
            ConfigError: it cannot add to these targets, for the reason that `problem_of` gives.
        """
        settings, routing = pending.settings, pending.routing
        if not settings.fp8_wgrad:
            Bf16Engine().backward_dw(pending, targets)
            return
        require_operands(pending)
        places = Destinations.of(targets, _GEMMS)
        if routing.num_rows > 0 and places.are_wanted:
            x = plain_tokens(pending.x)
            with plain_ops(), _launches(x, settings, routing) as (gemms, rows):
                self._add(pending, targets, places, gemms, rows)
        pending.x = pending.dout = pending.dz = pending.y1s = pending.native = None

    def _add(
        self,
        pending: PendingWgrad,
        targets: GradientTargets,
        places: Destinations,
        gemms: MxGemms,
        rows: ExpertRows,
    ) -> None:
        for place in filter(None, (places.dw1, places.dw2)):
            gemms.load_wgrad(place.stored)
        # All memory is taken before the first addition.
        x_rows = None
        if places.dw1 is not None:
            x_rows = _quantised("x", plain_tokens(pending.x), pending.routing, along_columns=False)
        targets.adding = True
        if places.dw2 is not None:
            with stage("dw2"):
                operands = _along_rows(pending.native), _along_rows(pending.y1s)
                gemms.wgrad_down(*operands, places.dw2.tensor, rows.cu_rows, places.dw2.stored)
                del operands
        if pending.settings.frees_stagewise:
            pending.dout = pending.y1s = pending.native = None
        if places.dw1 is not None:
            with stage("dw1"):
                operands = _along_rows(x_rows), _along_rows(pending.dz)
                gemms.wgrad_up(*operands, places.dw1.tensor, rows.cu_rows, places.dw1.stored)
        targets.adding = False

    def problem_of(self, targets: ParameterTargets, settings: EngineSettings) -> str | None:
        """As the seam says; its GEMMs must be able to add there."""
        return bf16_gradients.problem_of(targets, _GEMMS if settings.fp8_wgrad else "BF16")


@dataclass(frozen=True)
class _Layer:
    """What the passes of one layer share."""

    x: Tensor
    routing: RoutingMetadata
    weights: EngineWeights
    settings: EngineSettings

    @property
    def n1(self) -> int:
        return int(self.weights.w1.shape[1])

    @property
    def inner(self) -> int:
        return self.weights.intermediate_size

    def rows(self, width: int) -> Tensor:
        """Unwritten bf16 `[R, width]`."""
        shape = (self.routing.num_rows, width)
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device)

    def quantised(self, name: str, tokens: Tensor, *, along_rows: bool) -> MxTensor:
        """x or dout in expert order, for a contraction over H, and over the rows too."""
        shows = self.settings.fp8_wgrad
        return _quantised(name, tokens, self.routing, shows=shows, along_rows=along_rows)

    def empty_y1(self) -> MxTensor:
        """Unwritten `[R, I]` with one scale per row and 32."""
        rows, routing = self.routing.num_rows, self.routing
        device = device_of(self.x)
        atoms = mx.ragged_atoms(rows, routing.num_experts), -(-self.inner // mx.ATOM_ROWS)
        scales = empty((*atoms, mx.ATOM_BYTES), torch.uint8, device)
        codes = empty((rows, self.inner), torch.uint8, device)
        return MxTensor.of(codes, scales, None, mx.ROW_BLOCK, routing.padded_offsets)

    def restored_z(self, saved: Saved, gemms: MxGemms, rows: ExpertRows) -> Tensor:
        """z as forward wrote it, or computed again to the same bits."""
        if saved.z is not None:
            return plain_tokens(saved.z)
        z = self.rows(self.n1)
        x_rows = self.quantised("x", self.x, along_rows=False)
        gemms.up_again(_along_columns(x_rows), _along_columns(self.weights.w1), z, rows.cu_rows)
        return z

    def backward_dx(
        self, dout: Tensor, saved: Saved, pending: PendingWgrad, gemms: MxGemms, rows: ExpertRows
    ) -> tuple[Tensor, Tensor]:
        """`(dx, dprobs)`, and the operands of wgrad in `pending`."""
        routing, settings, weights = self.routing, self.settings, self.weights
        fp8_wgrad = settings.fp8_wgrad
        dout_rows = self.quantised("dout", dout, along_rows=fp8_wgrad)
        z, dz, y1s = self.restored_z(saved, gemms, rows), pending.dz, pending.y1s
        shape = (routing.num_rows, gemms.dprob_tiles(self.inner))
        partials = torch.empty(shape, dtype=torch.float32, device=dout.device)
        with stage("dgated"):
            operands = _along_columns(dout_rows), _along_rows(weights.w2_dgrad)
            gemms.dgated(*operands, dz, z, y1s, routing.row_prob, partials, rows.cu_rows)
            del operands
        # Only now: where memory ran out above, the backward may be repeated.
        if settings.frees_stagewise:
            saved.z = None
        del z
        row_dprob = rows.sum_partials(partials, dout, None)
        dz, y1s = tap("dz", dz), tap("y1s", y1s)
        with stage("quantize_dz"):
            dz_rows = self._in_order("dz", dz, along_rows=fp8_wgrad)
            if fp8_wgrad:
                # Nobody contracts y1s over its columns.
                y1s = self._in_order("y1s", y1s, along_columns=False)
                pending.dz, pending.y1s, pending.native = dz_rows, y1s, dout_rows
        del dz, y1s, dout_rows
        dx_rows = self.rows(weights.hidden_size)
        with stage("dx_gemm"):
            operands = _along_columns(dz_rows), _along_rows(weights.w1_dgrad)
            gemms.dgrad(*operands, dx_rows, rows.cu_rows)
        with stage("aggregate_dx"):
            dx = tap("dx", aggregate(tap("dx_rows", dx_rows), routing, weighted=False))
            return dx, tap("ds", scatter_to_slots(row_dprob, routing))

    def _in_order(
        self, name: str, values: Tensor, *, along_columns: bool = True, along_rows: bool = True
    ) -> MxTensor:
        """dz or y1s, which lie in expert order."""
        q = mx.quantize_rows_iso32(
            values,
            self.routing.row_token,
            self.routing.padded_offsets,
            gathers=False,
            along_columns=along_columns,
            along_rows=along_rows,
        )
        q = _shown("dz_fp8", q) if name == "dz" else q
        return _shown(f"wgrad_{name}", q) if self.settings.fp8_wgrad else q


def _quantised(
    name: str,
    tokens: Tensor,
    routing: RoutingMetadata,
    *,
    shows: bool = True,
    along_columns: bool = True,
    along_rows: bool = True,
) -> MxTensor:
    """x or dout, gathered. Both products read the same codes, which show themselves as wgrad's,
    where that is quantised.
    """
    with stage(f"quantize_{name}"):
        q = mx.quantize_rows_iso32(
            tokens,
            routing.row_token,
            routing.padded_offsets,
            gathers=True,
            along_columns=along_columns,
            along_rows=along_rows,
        )
    return _shown(f"wgrad_{name}", q) if shows else q


def _shown(name: str, q: MxTensor) -> MxTensor:
    """`tap`; what a listener returns instead is written over the operand."""
    shown = tap(name, q)
    if shown is not q:
        q.overwrite(shown)
    return q


def _along_columns(q: Any) -> Pair:
    return q.bytes, q.along_columns


def _along_rows(q: Any) -> Pair:
    return q.bytes, q.along_rows


@contextmanager
def _launches(
    x: Tensor, settings: EngineSettings, routing: RoutingMetadata
) -> Iterator[tuple[MxGemms, ExpertRows]]:
    """The GEMMs of this layer and the rows of this routing, on the caller's stream."""
    gpu, own = gpu_of(device_name(x)), settings.activation_parameters
    shape = MxShape(settings.activation, own, settings.gemm_num_sms > 0, arch=gpu.arch)
    with launch_scope(x):
        yield mx_gemms(shape, gpu.lent(settings)), ExpertRows.of(routing)
