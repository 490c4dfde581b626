"""The MXFP8 engine for Blackwell: recipe `iso32-pow2` on the block-scaled grouped GEMMs of
`kernels.blackwell`, operands quantised by kernels of ours (`mx`); `products` has the passes.

Compiled, and never run on a GPU of its architectures by this project: chosen by name only. One set
of codes serves both contractions of an operand. x is quantised again in backward instead of kept:
that costs a launch, and its codes, R x H bytes, live in no other pass.

Quantisation points, blocks and codes are those of the reference engine; results differ by the order
of additions. y1's scale comes from its largest value times the rounded reciprocal of 448, so it may be
the next power of two where the quotient is one, and an infinite element of y1 is NaN alone instead
of with its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...interop import device_name, device_of, empty
from ...kernels.blackwell.mx_gemm import MxGemms, Pair, mx_gemms
from ...layouts import NATIVE, WeightLayout
from ...observe import stage, tap
from ...quant.gpu import QuantizedWeights
from ...routing.metadata import RoutingMetadata
from ..bf16 import Bf16Engine
from ..expert_rows import ExpertRows, launch_scope
from ..gpu import gpu_of
from ..interface import EngineWeights
from ..kernel_jobs import mx_shape
from ..products import Products, ProductsEngine
from ..quantised_engine import QuantisedEngine
from ..settings import EngineSettings
from ..targets import GradientTargets
from ..tokens import PendingWgrad, plain_tokens
from . import bf16_gradients, mx
from .mx import MxTensor, MxWeights

Tensor = torch.Tensor
_GEMMS = "MXFP8"


class Mxfp8Engine(QuantisedEngine, ProductsEngine):
    """See the module docstring; `capabilities.MXFP8` says what it takes."""

    name = "mxfp8"

    def _empty_store(self, settings: EngineSettings) -> QuantizedWeights:
        return MxWeights()

    @contextmanager
    def _products(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> Iterator[Products]:
        with _launches(x, settings, routing) as (gemms, rows):
            yield _MxProducts(routing, weights, gemms, rows, settings.fp8_wgrad)

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Add weight gradients; with `fp8_wgrad` off on the GEMMs of the BF16 engine."""
        if pending.settings.fp8_wgrad:
            super().backward_dw(pending, targets)
        else:
            Bf16Engine().backward_dw(pending, targets)

    def _add(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        into_dw1, into_dw2 = bf16_gradients.outputs_of(targets, _GEMMS)
        settings, routing = pending.settings, pending.routing
        if routing.num_rows == 0 or not (into_dw1 or into_dw2):
            return
        x = plain_tokens(pending.x)
        with _launches(x, settings, routing) as (gemms, rows):
            for output in filter(None, (into_dw1, into_dw2)):
                gemms.load_wgrad(output.stored)
            # All memory is taken before the first addition.
            x_rows = None
            if into_dw1 is not None:
                x_rows = _gathered("x", x, routing, along_columns=False)
            targets.adding = True
            if into_dw2 is not None:
                with stage("dw2"):
                    operands = _along_rows(pending.native), _along_rows(pending.y1s)
                    gemms.wgrad_down(*operands, into_dw2.tensor, rows.cu_rows, into_dw2.stored)
                    del operands
            if settings.frees_stagewise:
                pending.dout = pending.y1s = pending.native = None
            if into_dw1 is not None:
                with stage("dw1"):
                    operands = _along_rows(x_rows), _along_rows(pending.dz)
                    gemms.wgrad_up(*operands, into_dw1.tensor, rows.cu_rows, into_dw1.stored)
            targets.adding = False

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        """Why its GEMMs cannot add there, or None."""
        return bf16_gradients.problem_of(targets, _GEMMS if settings.fp8_wgrad else "BF16")


@dataclass(eq=False)
class _MxProducts(Products):
    """The products of one shape; every argument is named in `MxGemms`."""

    gemms: MxGemms
    rows: ExpertRows
    fp8_wgrad: bool

    def tokens(self, name: str, values: Tensor) -> MxTensor:
        """Quantised, in expert order."""
        # wgrad quantises x again, so only dout is contracted over the rows too.
        along_rows = self.fp8_wgrad and name == "dout"
        return _gathered(name, values, self.routing, shows=self.fp8_wgrad, along_rows=along_rows)

    def empty_y1(self, like: Tensor) -> MxTensor:
        """With one scale per row and 32."""
        # The GEMM of `up` writes codes and scales itself, in the layout that `down` reads.
        routing, inner = self.routing, self.weights.intermediate_size
        device = device_of(like)
        atoms = mx.ragged_atoms(routing.num_rows, routing.num_experts), -(-inner // mx.ATOM_ROWS)
        scales = empty((*atoms, mx.ATOM_BYTES), torch.uint8, device)
        codes = empty((routing.num_rows, inner), torch.uint8, device)
        return MxTensor.of(codes, scales, None, mx.ROW_BLOCK, routing.padded_offsets)

    def up(self, x: MxTensor, z: Tensor | None, y1: MxTensor) -> None:
        operands = _along_columns(x), _along_columns(self.weights.w1)
        self.gemms.up(*operands, z, _along_columns(y1), self.rows.cu_rows)

    def up_again(self, x: MxTensor, z: Tensor) -> None:
        operands = _along_columns(x), _along_columns(self.weights.w1)
        self.gemms.up_again(*operands, z, self.rows.cu_rows)

    def down(self, y1: MxTensor, y2: Tensor) -> None:
        operands = _along_columns(y1), _along_columns(self.weights.w2)
        self.gemms.down(*operands, y2, self.rows.cu_rows)

    def dgated(self, dout: MxTensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[R, tiles]`."""
        sizes = self.routing.num_rows, self.gemms.dprob_tiles(self.weights.intermediate_size)
        partials = torch.empty(sizes, dtype=torch.float32, device=dz.device)
        operands = _along_columns(dout), _along_rows(self.weights.w2_dgrad)
        prob, cu_rows = self.routing.row_prob, self.rows.cu_rows
        self.gemms.dgated(*operands, dz, z, y1s, prob, partials, cu_rows)
        return partials

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        return self.rows.sum_partials(partials, dout, None)

    def settle(self, pending: PendingWgrad, dout: MxTensor) -> MxTensor:
        """Quantise dz and y1s, which lie in expert order."""
        with stage("quantize_dz"):
            # wgrad contracts dz over the rows; without FP8 wgrad nobody asks for those scales.
            dz = self._quantised("dz", pending.dz, along_rows=self.fp8_wgrad)
            if self.fp8_wgrad:
                # Nobody contracts y1s over its columns.
                pending.y1s = self._quantised("y1s", pending.y1s, along_columns=False)
                pending.dz, pending.native = dz, dout
        return dz

    def dgrad(self, dz: MxTensor, dx_rows: Tensor) -> None:
        operands = _along_columns(dz), _along_rows(self.weights.w1_dgrad)
        self.gemms.dgrad(*operands, dx_rows, self.rows.cu_rows)

    def shown(self, name: str, operand: Any) -> Any:
        return _shown(name, operand) if isinstance(operand, MxTensor) else tap(name, operand)

    def _quantised(self, name: str, values: Tensor, **directions: bool) -> MxTensor:
        token, ends = self.routing.row_token, self.routing.padded_offsets
        q = mx.quantize_rows_iso32(values, token, ends, gathers=False, **directions)
        q = _shown("dz_fp8", q) if name == "dz" else q
        return _shown(f"wgrad_{name}", q) if self.fp8_wgrad else q


def _gathered(
    name: str, tokens: Tensor, routing: RoutingMetadata, *, shows: bool = True, **directions: bool
) -> MxTensor:
    """x or dout."""
    # Both products read the same codes, which show themselves as wgrad's, where that is quantised.
    with stage(f"quantize_{name}"):
        token, ends = routing.row_token, routing.padded_offsets
        q = mx.quantize_rows_iso32(tokens, token, ends, gathers=True, **directions)
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
    gpu = gpu_of(device_name(x))
    with launch_scope(x):
        yield mx_gemms(mx_shape(settings, gpu.arch), gpu.lent(settings)), ExpertRows.of(routing)
