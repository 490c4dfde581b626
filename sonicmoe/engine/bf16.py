"""The BF16 engine for Hopper and Blackwell. Every product is a grouped GEMM of `kernels.quack_gemm`
with gather, activation and its gradient fused.

    forward       z, y1 = up(x)            y2 = down(y1)         out = weighted sum per token
    backward_dx   dz, y1s, dprobs = dgated(dout, z)              dx = sum per token of dgrad(dz)
    backward_dw   dw2 += dout^T y1s        dw1 += dz^T x

Rounds where the reference engine rounds: z, y1, y2, dz, y1s and dx rows to the dtype of the tokens;
everything between is fp32. Waits for nothing, allocates by `routing.num_rows`, adds in a fixed
order: equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..diagnostics.stages import stage, tap
from ..errors import DTypeError, expect
from ..interop import (
    IS_PADDLE,
    aligned,
    current_stream,
    device_name,
    dtype_name,
    plain_ops,
)
from ..kernels.quack_gemm import (
    GroupedGemms,
    MlpShape,
    expert_rows_module,
    grouped_gemms,
    launching_on,
)
from ..routing.backends import arch_of
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from . import bf16_gradients
from .bf16_gradients import Destinations
from .capabilities import BF16
from .interface import (
    EngineSettings,
    EngineWeights,
    GradientTargets,
    ParameterTargets,
    PendingWgrad,
    Saved,
    Tokens,
    check_dout,
    check_forward,
    plain_tokens,
)
from .native_weights import NativeWeightsEngine, empty_rows, plain_operand

Tensor = torch.Tensor


class Bf16Engine(NativeWeightsEngine):
    """See the module docstring; `capabilities.BF16` says what it takes."""

    name = "bf16"

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Two GEMMs and a weighted gather-and-sum; `save=False` writes no z."""
        check_forward(x, routing, weights, settings, BF16)
        w1, w2 = plain_operand(weights.w1), plain_operand(weights.w2)
        expect(
            x.dtype == w1.dtype,
            DTypeError,
            f"x is {dtype_name(x.dtype)}; the weights are {dtype_name(w1.dtype)}, and one dtype is needed",
        )
        with plain_ops():
            x = plain_tokens(aligned(x))  # others were refused
            # The kernel writes z only where it is given memory for it.
            keeps_z = save and not settings.recompute_z
            z = empty_rows(routing, int(w1.shape[1]), x) if keeps_z else None
            # A rank may receive no valid slot. Then there is nothing to launch, and every output is
            # zero.
            if routing.num_rows == 0:
                out = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                return out, Saved(settings, routing, x, z) if save else None
            y1 = empty_rows(routing, weights.intermediate_size, x)
            y2 = empty_rows(routing, weights.hidden_size, x)
            with _launches(x, weights, settings, routing) as (gemms, rows):
                with stage("up"):
                    gemms.up(x, w1, z, y1, weights.b1, rows.cu_rows, rows.gather_index)
                z = None if z is None else tap("z", z)
                with stage("down"):
                    gemms.down(tap("y1", y1), w2, y2, weights.b2, rows.cu_rows)
            with stage("aggregate_out"):
                out = tap("out", aggregate(tap("y2", y2), routing, weighted=True))
            return out, Saved(settings, routing, x, z) if save else None

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """dgated with dprobs' row sums, dgrad, an unweighted gather-and-sum."""
        dout = check_dout(dout, saved, BF16)
        settings, routing, x = saved.settings, saved.routing, plain_tokens(saved.x)
        with plain_ops():
            # The caller's gradient may have another dtype than the tokens; the GEMMs take operands
            # of one.
            dout = plain_tokens(aligned(plain_tokens(dout).to(x.dtype)))
            w1 = plain_operand(weights.w1_dgrad)
            dz, y1s = (
                empty_rows(routing, int(w1.shape[1]), x),
                empty_rows(routing, weights.intermediate_size, x),
            )
            # `pending` keeps x and dout alive until the weight gradients are added.
            pending = PendingWgrad(settings, routing, x, dout, dz, y1s)
            if routing.num_rows == 0:
                dx = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                dprobs = torch.zeros(
                    (routing.num_tokens, routing.topk), dtype=torch.float32, device=x.device
                )
            else:
                with _launches(x, weights, settings, routing) as (gemms, rows):
                    row_dprob = _dgated(gemms, rows, dout, saved, weights, dz, y1s)
                    dz = pending.dz = tap("dz", dz)
                    pending.y1s = tap("y1s", y1s)
                    dx_rows = empty_rows(routing, weights.hidden_size, x)
                    with stage("dx_gemm"):
                        gemms.dgrad(dz, w1, dx_rows, rows.cu_rows)
                with stage("aggregate_dx"):
                    dx = tap("dx", aggregate(tap("dx_rows", dx_rows), routing, weighted=False))
                    dprobs = tap("ds", scatter_to_slots(row_dprob, routing))
            # `pending` has its own reference to x. Without one here `check_dout` refuses a second
            # backward, which the freed z could not serve.
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """A GEMM for each projection that anybody wants the gradient of, and the bias sums.

        Raises:
            ConfigError: it cannot add to these targets, for the reason that `problem_of` gives.
        """
        places, settings, routing = Destinations.of(targets), pending.settings, pending.routing
        x, dout, dz, y1s = pending.x, pending.dout, pending.dz, pending.y1s
        if x is None or dout is None or dz is None or y1s is None:
            raise RuntimeError(
                "the operands of these weight gradients were released by an earlier backward_dw"
            )
        if routing.num_rows > 0 and places.are_wanted:
            x, dout = plain_tokens(x), plain_tokens(dout)
            gemms = _gemms_of_operands(x, dz, y1s, places, settings)
            with plain_ops(), launch_scope(x):
                rows = ExpertRows.of(routing)
                if places.dw2 is not None:
                    gemms.load_wgrad("wgrad_down", places.dw2.stored)
                if places.dw1 is not None:
                    gemms.load_wgrad("wgrad_up", places.dw1.stored)
                targets.adding = True
                if places.db1 is not None and places.db2 is not None:
                    rows.add_columns(dout, places.db2, weight=routing.row_prob)
                    rows.add_columns(dz, places.db1, weight=None)
                if places.dw2 is not None:
                    with stage("dw2"):
                        tensor, stored = places.dw2
                        gemms.wgrad_down(dout, y1s, tensor, rows.cu_rows, rows.gather_index, stored)
                if settings.frees_stagewise:
                    # The local names count too: the memory is free for dw1 only when all references
                    # are gone.
                    pending.dout = pending.y1s = dout = y1s = None
                if places.dw1 is not None:
                    with stage("dw1"):
                        tensor, stored = places.dw1
                        gemms.wgrad_up(x, dz, tensor, rows.cu_rows, rows.gather_index, stored)
                targets.adding = False
        pending.x = pending.dout = pending.dz = pending.y1s = None

    def problem_of(self, targets: ParameterTargets, settings: EngineSettings) -> str | None:
        """As the seam says; its GEMMs must be able to add there."""
        return bf16_gradients.problem_of(targets)


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
        native.index_rows(
            routing.row_token,
            routing.expert_counts,
            routing.padded_offsets,
            gather_index,
            cu_rows,
            stream,
        )
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


def _dgated(
    gemms: GroupedGemms,
    rows: ExpertRows,
    dout: Tensor,
    saved: Saved,
    weights: EngineWeights,
    dz: Tensor,
    y1s: Tensor,
) -> Tensor:
    """Fill dz and y1s; returns fp32 `row_dprob [R]`."""
    routing = saved.routing
    z = _restore_z(gemms, rows, saved, weights)
    # A tile sums <dy1, y1> over its own columns. The partial sums are added in a second launch and
    # in a fixed order, because atomics would change the order, and the bits, from run to run.
    partials = torch.empty(
        (routing.num_rows, gemms.dprob_tiles), dtype=torch.float32, device=dout.device
    )
    w2 = plain_operand(weights.w2_dgrad)
    with stage("dgated"):
        gemms.dgated(
            dout, w2, dz, z, y1s, routing.row_prob, partials, rows.cu_rows, rows.gather_index
        )
    if saved.settings.frees_stagewise:
        saved.z = None
    return rows.sum_partials(partials, dout, weights.b2)


def _restore_z(
    gemms: GroupedGemms, rows: ExpertRows, saved: Saved, weights: EngineWeights
) -> Tensor:
    """z as forward wrote it, or computed again to the same bits."""
    if saved.z is not None:
        return plain_operand(saved.z)
    x, w1 = plain_tokens(saved.x), plain_operand(weights.w1)
    z = empty_rows(saved.routing, int(w1.shape[1]), x)
    gemms.up_again(x, w1, z, weights.b1, rows.cu_rows, rows.gather_index)
    return z


@contextmanager
def _launches(
    x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
) -> Iterator[tuple[GroupedGemms, ExpertRows]]:
    """The GEMMs of these weights and the rows of this routing, on the caller's stream."""
    shape = _shape_of(
        plain_operand(weights.w1), plain_operand(weights.w2), settings, weights.b1 is not None
    )
    with launch_scope(x):
        yield grouped_gemms(shape, gpu_of(device_name(x)).lent(settings)), ExpertRows.of(routing)


@contextmanager
def launch_scope(tensor: Tensor) -> Iterator[None]:
    """The device and stream of the caller, for kernels that take them from the process's state."""
    if IS_PADDLE:
        with launching_on(_index_of(device_name(tensor)), current_stream(tensor)):
            yield
    else:
        with torch.cuda.device(tensor.device):
            yield


def _gemms_of_operands(
    x: Tensor, dz: Tensor, y1s: Tensor, places: Destinations, settings: EngineSettings
) -> GroupedGemms:
    sizes, bias = (int(x.shape[1]), int(y1s.shape[1])), places.db1 is not None
    gpu = gpu_of(device_name(x))
    shape = _shape(sizes, settings, dtype_name(dz.dtype), bias, gpu.arch)
    return grouped_gemms(shape, gpu.lent(settings))


def _shape_of(w1: Tensor, w2: Tensor, settings: EngineSettings, bias: bool) -> MlpShape:
    sizes, arch = (int(w1.shape[2]), int(w2.shape[2])), gpu_of(device_name(w1)).arch
    return _shape(sizes, settings, dtype_name(w1.dtype), bias, arch)


def _shape(
    sizes: tuple[int, int], settings: EngineSettings, dtype: str, bias: bool, arch: str
) -> MlpShape:
    own, capped = settings.activation_parameters, settings.gemm_num_sms > 0
    return MlpShape(*sizes, settings.activation, dtype, bias, own, capped, arch=arch)


def _index_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)


class _Gpu(NamedTuple):
    """The properties of a GPU that launches depend on."""

    arch: str
    multiprocessors: int

    def lent(self, settings: EngineSettings) -> int:
        """How many of its multiprocessors the GEMMs may take."""
        return min(settings.gemm_num_sms or self.multiprocessors, self.multiprocessors)


@lru_cache(maxsize=64)
def gpu_of(device: str) -> _Gpu:
    """The GPU of this name, "cuda:0"; asked once."""
    properties = torch.cuda.get_device_properties(_index_of(device))
    return _Gpu(arch_of(device), int(properties.multi_processor_count))
