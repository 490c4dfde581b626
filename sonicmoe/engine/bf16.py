"""The BF16 engine for Hopper and Blackwell. Every product is a grouped GEMM with activation and its
gradient fused, and with the gather of tokens but for wide experts on Hopper: there of our own
(`bf16_sm90`), elsewhere of `kernels.quack_gemm`. `products` has the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..architectures import SM90
from ..enums import is_glu
from ..interop import IS_PADDLE, current_stream, device_name, dtype_name, is_cuda, plain_ops
from ..kernels.quack_gemm import (
    GroupedGemms,
    expert_rows_module,
    grouped_gemms,
    launching_on,
)
from ..layouts import NATIVE, StackedWeights, WeightLayout
from ..observe import stage
from ..routing.backends import index_of_gpu
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from . import bf16_gradients, bf16_sm90
from .bf16_weights import are_lent, kind_of, recognised, remember, weights_in_place
from .gpu import gpu_of
from .interface import EngineWeights
from .kernel_jobs import mlp_shape
from .plain_engine import PlainEngine
from .products import Products, plain_operand
from .settings import EngineSettings
from .targets import GradientTargets
from .tokens import PendingWgrad, plain_tokens

Tensor = torch.Tensor


class Bf16Engine(PlainEngine):
    """See the module docstring; `capabilities.BF16` says what it takes."""

    name = "bf16"
    frees_dw1_first = True  # on Hopper, where it writes fresh gradients

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        written: bool = True,
    ) -> EngineWeights:
        """As every engine's; on Hopper the weights stay where they lie."""
        if not (is_cuda(source.anchor) and _is_hopper(device_name(source.anchor))):
            return super().refresh(source, settings, previous, written)
        source = self._computed_in_bfloat16(source)
        with plain_ops():
            weights = weights_in_place(source, settings.activation)
        self._check_kinds(weights, settings)
        prepared = bf16_sm90.Prepared(settings, are_lent(weights, source))
        object.__setattr__(weights, "native", prepared)
        return weights

    def remake(self, previous: EngineWeights) -> bool:
        """On Hopper there is nothing to make of weights that are read where they lie."""
        prepared = previous.native
        return prepared is not None and prepared.are_lent and previous.b1 is None

    def read_stacked(
        self,
        weights: StackedWeights,
        layout: WeightLayout,
        dtype: torch.dtype | None,
        settings: EngineSettings,
    ) -> EngineWeights:
        """The same; on Hopper a known kind of weights is asked for addresses alone."""
        kind = kind_of(weights, layout, dtype, settings)
        found = recognised(kind, weights)
        if found is None:
            found = super().read_stacked(weights, layout, dtype, settings)
            if found.native is not None and found.native.are_lent:
                remember(kind, settings, found)
        return found

    def _products(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> AbstractContextManager[Products]:
        # Weights that Hopper's kernels have read know them.
        if weights.native is None and not _is_hopper(device_name(x)):
            return self._products_of_quack(x, weights, settings, routing)
        kernels = bf16_sm90.kernels_for(x, settings, weights)
        sums, stream = partial(_row_sums, routing), current_stream(x)
        given = routing, weights, kernels, settings, sums, stream
        return nullcontext(bf16_sm90.HopperProducts(*given))

    @contextmanager
    def _products_of_quack(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> Iterator[Products]:
        # Tiles depend on these two, and on no number of tokens: a batch of another size compiles
        # nothing.
        sizes = weights.hidden_size, weights.intermediate_size
        gemms = _gemms(x, sizes, settings, weights.b1 is not None)
        with launch_scope(x):
            yield _Products(routing, weights, gemms, ExpertRows.of(routing))

    def _adapted(self, products: Products, settings: EngineSettings, projected: Any) -> Any:
        """On Hopper inside the GEMMs."""
        if isinstance(products, bf16_sm90.HopperProducts):
            products.adapt(projected)
            return products
        return super()._adapted(products, settings, projected)

    def _may_write_dz_over_z(self, z: Tensor) -> bool:
        """On Hopper a tile reads its part of z before it writes the same part of dz."""
        return _is_hopper(device_name(z))

    def _sum_biases(self, pending: PendingWgrad, db1: Tensor, db2: Tensor) -> None:
        dout, routing = plain_tokens(pending.dout), pending.routing
        with launch_scope(dout):
            rows = ExpertRows.of(routing)
            rows.add_columns(dout, db2, weight=routing.row_prob)
            rows.add_columns(plain_operand(pending.dz), db1, weight=None)

    def _add(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        biases = self.bias_gradients(pending) if targets.has_biases else None
        if _is_hopper(device_name(pending.dz)):
            bf16_sm90.add_gradients(pending, targets, biases)
            return
        into_dw1, into_dw2 = bf16_gradients.outputs_of(targets)
        settings, routing = pending.settings, pending.routing
        if routing.num_rows == 0 or not (into_dw1 or into_dw2 or biases):
            return
        # dout and y1s have no local name that lasts: their memory is free for dw1 only when all
        # references are gone.
        x, dz = plain_tokens(pending.x), plain_operand(pending.dz)
        sizes = int(x.shape[1]), int(pending.y1s.shape[1])
        gemms = _gemms(x, sizes, settings, biases is not None)
        with launch_scope(x):
            rows = ExpertRows.of(routing)
            if into_dw2 is not None:
                gemms.load_wgrad("wgrad_down", into_dw2.stored)
            if into_dw1 is not None:
                gemms.load_wgrad("wgrad_up", into_dw1.stored)
            targets.adding = True
            if biases is not None:
                targets.add_biases(*biases, split_half=False)
            index = rows.cu_rows, rows.gather_index
            if into_dw2 is not None:
                with stage("dw2"):
                    tensor, stored = into_dw2
                    operands = plain_tokens(pending.dout), pending.y1s
                    gemms.wgrad_down(*operands, tensor, *index, stored)
                    del operands
            if settings.frees_stagewise:
                pending.dout = pending.y1s = None
            if into_dw1 is not None:
                with stage("dw1"):
                    tensor, stored = into_dw1
                    gemms.wgrad_up(x, dz, tensor, *index, stored)
            targets.adding = False

    def writes_gradients(self, settings: EngineSettings, device: str) -> bool:
        """On Hopper; elsewhere its GEMMs only add."""
        return _is_hopper(device)

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        """As the seam says; its GEMMs must be able to add there."""
        if not (targets.wants("dw1") or targets.wants("dw2")):
            return None
        if _is_hopper(device_name(targets.anchor)):
            return bf16_sm90.problem_of(targets, layout, is_glu(settings.activation))
        return bf16_gradients.problem_of(targets)


def _is_hopper(device: str) -> bool:
    """Whether the GEMMs on this device, by name, are our own."""
    return device != "cpu" and gpu_of(device).arch == SM90.name


def _row_sums(
    routing: RoutingMetadata, partials: Tensor, dout: Tensor, b2: Tensor | None
) -> Tensor:
    return ExpertRows.of(routing).sum_partials(partials, dout, b2)


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of each expert as the kernels want them, made on the device.

    The GEMMs run over padded rows: they know an expert as the rows between two neighbouring
    offsets, which cannot skip padding, and a tile has 128 rows anyway. A padding row gathers what
    its expert's last true row gathers, with probability 0: it is finite wherever the expert's own
    rows are, its dz and y1s are zeros, and no index is out of bounds.

    cu_rows int32 `[E+1]`; gather_index int32 `[R]`, a token in every row; native: the module of
    the row kernels.
    """

    cu_rows: Tensor
    gather_index: Tensor
    stream: int
    native: Any

    @classmethod
    def of(cls, routing: RoutingMetadata) -> ExpertRows:
        device = routing.row_token.device
        # int32, because the GEMMs take 32-bit offsets; the metadata's are int64.
        cu_rows = torch.empty((routing.num_experts + 1,), dtype=torch.int32, device=device)
        gather_index = torch.empty((routing.num_rows,), dtype=torch.int32, device=device)
        stream = current_stream(routing.row_token)
        native = expert_rows_module(gpu_of(device_name(routing.row_token)).arch)
        counts, ends = routing.expert_counts, routing.padded_offsets
        native.index_rows(routing.row_token, counts, ends, gather_index, cu_rows, stream)
        return cls(cu_rows, gather_index, stream, native)

    def sum_partials(self, partials: Tensor, dout: Tensor, b2: Tensor | None) -> Tensor:
        """fp32 `[R]`: partials `[R, tiles]` summed, plus `<dout, b2>` of each row where there is a
        bias; one launch.
        """
        out = torch.empty((int(partials.shape[0]),), dtype=torch.float32, device=partials.device)
        bias = partials if b2 is None else b2  # without a bias that argument is not read
        self.native.row_sums(
            partials, dout, self.gather_index, bias, self.cu_rows, out, b2 is not None, self.stream
        )
        return out

    def add_columns(self, values: Tensor, accumulator: Tensor, *, weight: Tensor | None) -> None:
        """`accumulator[e]` += column sums of the expert's rows: of tokens gathered and weighted, or
        of row values; one launch.
        """
        gathered = weight is not None
        unread = self.gather_index if weight is None else weight
        self.native.column_sums(
            values, self.gather_index, unread, self.cu_rows, accumulator, gathered, self.stream
        )


@dataclass(eq=False)
class _Products(Products):
    """Of the GEMMs of one shape; every argument is named in `GroupedGemms`."""

    gemms: GroupedGemms
    rows: ExpertRows

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor) -> None:
        w1, b1, rows = plain_operand(self.weights.w1), self.weights.b1, self.rows
        self.gemms.up(x, w1, z, y1, b1, rows.cu_rows, rows.gather_index)

    def up_again(self, x: Tensor, z: Tensor) -> None:
        w1, b1, rows = plain_operand(self.weights.w1), self.weights.b1, self.rows
        self.gemms.up_again(x, w1, z, b1, rows.cu_rows, rows.gather_index)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        w2, b2 = plain_operand(self.weights.w2), self.weights.b2
        self.gemms.down(y1, w2, y2, b2, self.rows.cu_rows)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[R, tiles]`."""
        w2, prob, rows = plain_operand(self.weights.w2_dgrad), self.routing.row_prob, self.rows
        sizes = (self.routing.num_rows, self.gemms.dprob_tiles)
        partials = torch.empty(sizes, dtype=torch.float32, device=dout.device)
        self.gemms.dgated(dout, w2, dz, z, y1s, prob, partials, rows.cu_rows, rows.gather_index)
        return partials

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        return self.rows.sum_partials(partials, dout, self.weights.b2)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        self.gemms.dgrad(dz, plain_operand(self.weights.w1_dgrad), dx_rows, self.rows.cu_rows)


@contextmanager
def launch_scope(tensor: Tensor) -> Iterator[None]:
    """The device and stream of the caller, for kernels that take them from the process's state."""
    if IS_PADDLE:
        with launching_on(index_of_gpu(device_name(tensor)), current_stream(tensor)):
            yield
    else:
        with torch.cuda.device(tensor.device):
            yield


def _gemms(x: Tensor, sizes: tuple[int, int], settings: EngineSettings, bias: bool) -> GroupedGemms:
    """Those of a model with these H and I, for tokens like these."""
    gpu = gpu_of(device_name(x))
    shape = mlp_shape(settings, sizes, dtype_name(x.dtype), bias, gpu.arch)
    return grouped_gemms(shape, gpu.lent(settings))
