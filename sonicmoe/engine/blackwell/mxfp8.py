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
from functools import partial
from typing import Any

import torch

from ...interop import device_name, device_of, empty
from ...kernels.blackwell.mx_gemm import Pair, dprob_tiles, mx_gemms
from ...kernels.blackwell.quack_gemm import Gemms, Stored
from ...layouts import NATIVE, WeightLayout
from ...observe import stage, tap
from ...quant.gpu import QuantizedWeights
from ...routing.metadata import RoutingMetadata
from ..bf16 import Bf16Engine
from ..expert_rows import ExpertRows, launch_scope
from ..gpu import gpu_of
from ..interface import EngineWeights
from ..kernel_jobs import mx_shape
from ..products import Products, ProductsEngine, Wgrads
from ..quantised_engine import QuantisedEngine
from ..settings import EngineSettings
from ..targets import GradientTargets
from ..tokens import PendingWgrad, plain_tokens
from . import bf16_gradients, mx
from .bf16_gradients import StackedOutput
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

    @contextmanager
    def _wgrads(self, pending: PendingWgrad, targets: GradientTargets) -> Iterator[Wgrads]:
        into_dw1, into_dw2 = bf16_gradients.outputs_of(targets, _GEMMS)
        x, found = plain_tokens(pending.x), dict[str, Any]()
        with _launches(x, pending.settings, pending.routing) as (gemms, rows):

            def launch(output: StackedOutput, left: Any, right: Any) -> None:
                # Where memory is contiguous along the other axis, the operands change places, and so
                # do the result's axes.
                pair = _along_rows(left), _along_rows(right)
                one, other = pair if output.stored is Stored.INNER else pair[::-1]
                gemms.launch(_wgrad(output), *one, *other, output.tensor, rows.cu_rows)

            def dw2(output: StackedOutput) -> None:
                launch(output, pending.native, pending.y1s)

            def dw1(output: StackedOutput, x_rows: MxTensor) -> None:
                launch(output, x_rows, pending.dz)

            for output in filter(None, (into_dw1, into_dw2)):
                gemms.load(_wgrad(output))
            if into_dw2 is not None:
                found["dw2"] = partial(dw2, into_dw2)
            if into_dw1 is not None:
                x_rows = _gathered("x", x, pending.routing, along_columns=False)
                found["dw1"] = partial(dw1, into_dw1, x_rows)
            yield found

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        return bf16_gradients.problem_of(targets, _GEMMS if settings.fp8_wgrad else "BF16")


@dataclass(eq=False)
class _MxProducts(Products):
    """The products of one shape; operands as `mx_build` names them."""

    gemms: Gemms
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
        operands = *_along_columns(x), *_along_columns(self.weights.w1)
        name = "up_only" if z is None else "up"
        self.gemms.launch(name, *operands, z, *_along_columns(y1), self.rows.cu_rows)

    def up_again(self, x: MxTensor, z: Tensor) -> None:
        operands = *_along_columns(x), *_along_columns(self.weights.w1)
        self.gemms.launch("down", *operands, z, self.rows.cu_rows)

    def down(self, y1: MxTensor, y2: Tensor) -> None:
        operands = *_along_columns(y1), *_along_columns(self.weights.w2)
        self.gemms.launch("down", *operands, y2, self.rows.cu_rows)

    def dgated(self, dout: MxTensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[R, tiles]`."""
        sizes = self.routing.num_rows, dprob_tiles(self.weights.intermediate_size)
        partials = torch.empty(sizes, dtype=torch.float32, device=dz.device)
        operands = *_along_columns(dout), *_along_rows(self.weights.w2_dgrad)
        prob, cu_rows = self.routing.row_prob, self.rows.cu_rows
        self.gemms.launch("dgated", *operands, dz, z, y1s, prob, partials, cu_rows)
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
        operands = *_along_columns(dz), *_along_rows(self.weights.w1_dgrad)
        self.gemms.launch("dgrad", *operands, dx_rows, self.rows.cu_rows)

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


def _wgrad(output: StackedOutput) -> str:
    """The variant that adds there."""
    return "wgrad halves" if output.stored is Stored.HALVES else "wgrad"


def _along_columns(q: Any) -> Pair:
    return q.bytes, q.along_columns


def _along_rows(q: Any) -> Pair:
    return q.bytes, q.along_rows


@contextmanager
def _launches(
    x: Tensor, settings: EngineSettings, routing: RoutingMetadata
) -> Iterator[tuple[Gemms, ExpertRows]]:
    """The GEMMs of this layer and the rows of this routing, on the caller's stream."""
    gpu = gpu_of(device_name(x))
    with launch_scope(x):
        yield mx_gemms(mx_shape(settings, gpu.arch), gpu.lent(settings)), ExpertRows.of(routing)
