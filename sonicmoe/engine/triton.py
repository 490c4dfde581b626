"""The Triton engine, for every GPU that Triton compiles for: grouped GEMMs of `kernels/triton` in
bfloat16 or float16, with gather, activation and its gradient fused.

    forward       z, y1 = up(x)            y2 = down(y1)         out = weighted sum per token
    backward_dx   dz, y1s, dprobs = dgated(dout, z)              dx = sum per token of dgrad(dz)
    backward_dw   dw2 += dout^T y1s        dw1 += dz^T x

Rounds where the reference engine rounds: z, y1, y2, dz, y1s and dx rows to the dtype of the tokens;
everything between is fp32. Waits for nothing, allocates by `routing.num_rows`, adds in a fixed
order: equal calls give equal bits. dz lies gate first, `[R, 2, I]`: see `kernels/triton/gemms.py`.

Under TRITON_INTERPRET=1 it runs on the host, for tests.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..diagnostics.stages import is_heard, stage, tap
from ..errors import DTypeError, expect
from ..interop import IS_PADDLE, aligned, device_name, device_of, dtype_name, is_cuda, plain_ops
from ..kernels.triton.variants import ExpertShape
from ..routing.backends import arch_of, take_driver_from_paddle
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from . import triton_gradients
from .capabilities import TRITON
from .interface import (
    EngineSettings,
    EngineWeights,
    FreshTargets,
    GradientTargets,
    NativeBuffer,
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


class TritonEngine(NativeWeightsEngine):
    """See the module docstring; `capabilities.TRITON` says what it takes."""

    name = "triton"

    def _runs_beside(self, weight: Tensor) -> bool:
        return super()._runs_beside(weight) or _is_interpreted()

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
        check_forward(x, routing, weights, settings, TRITON)
        w1, w2 = plain_operand(weights.w1), plain_operand(weights.w2)
        expect(
            x.dtype == w1.dtype,
            DTypeError,
            f"x is {dtype_name(x.dtype)}; the weights are {dtype_name(w1.dtype)}, and one dtype is needed",
        )
        with plain_ops():
            x = plain_tokens(aligned(x))  # others were refused
            keeps_z = save and not settings.recompute_z
            z = empty_rows(routing, int(w1.shape[1]), x) if keeps_z else None
            # A rank may receive no valid slot. Then there is nothing to launch, and every output is
            # zero.
            if routing.num_rows == 0:
                out = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                return out, Saved(settings, routing, x, z) if save else None
            y1 = empty_rows(routing, weights.intermediate_size, x)
            y2 = empty_rows(routing, weights.hidden_size, x)
            with _launch_scope(x):
                calls, rows = _calls_of(weights, settings), _index(weights, settings, routing)
                with stage("up"):
                    calls.up(x, w1, weights.b1, z, y1, rows).launch()
                z = None if z is None else tap("z", z)
                with stage("down"):
                    calls.down(tap("y1", y1), w2, weights.b2, y2, rows).launch()
            with stage("aggregate_out"):
                out = tap("out", aggregate(tap("y2", y2), routing, weighted=True))
            return out, Saved(settings, routing, x, z) if save else None

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """dgated with dprobs' row sums, dgrad, an unweighted gather-and-sum."""
        dout = check_dout(dout, saved, TRITON)
        settings, routing, x = saved.settings, saved.routing, plain_tokens(saved.x)
        with plain_ops():
            # The caller's gradient may have another dtype than the tokens; the GEMMs take operands
            # of one.
            dout = plain_tokens(aligned(plain_tokens(dout).to(x.dtype)))
            w1, w2 = plain_operand(weights.w1_dgrad), plain_operand(weights.w2_dgrad)
            dz = empty_rows(routing, int(w1.shape[1]), x)
            y1s = empty_rows(routing, weights.intermediate_size, x)
            # `pending` keeps x and dout alive until the weight gradients are added.
            pending = PendingWgrad(settings, routing, x, dout, dz, y1s)
            if routing.num_rows == 0:
                dx = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                slots = routing.num_tokens, routing.topk
                dprobs = torch.zeros(slots, dtype=torch.float32, device=x.device)
            else:
                with _launch_scope(x):
                    calls, rows = _calls_of(weights, settings), _index(weights, settings, routing)
                    z = _restore_z(calls, rows, saved, weights)
                    sizes = (calls.dprob_tiles, routing.num_rows)
                    partials = torch.empty(sizes, dtype=torch.float32, device=x.device)
                    row_dprob = torch.empty(sizes[1:], dtype=torch.float32, device=x.device)
                    with stage("dgated"):
                        prob = routing.row_prob
                        calls.dgated(dout, w2, z, dz, y1s, prob, partials, rows).launch()
                    if settings.frees_stagewise:
                        saved.z = None
                    del z
                    # A tile sums <dy1, y1> over its own columns. The partial sums are added in a
                    # second launch and in a fixed order.
                    calls.row_sums(partials, dout, weights.b2, row_dprob, rows).launch()
                    dz = pending.dz = _shown_dz(dz, calls.shape.parts)
                    pending.y1s = tap("y1s", y1s)
                    dx_rows = empty_rows(routing, weights.hidden_size, x)
                    with stage("dx_gemm"):
                        calls.dgrad(dz, w1, dx_rows, rows).launch()
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
        routing = pending.routing
        x, dout, dz, y1s = pending.x, pending.dout, pending.dz, pending.y1s
        if x is None or dout is None or dz is None or y1s is None:
            raise RuntimeError(
                "the operands of these weight gradients were released by an earlier backward_dw"
            )
        x, dout = plain_tokens(x), plain_tokens(dout)
        with plain_ops(), _launch_scope(x):
            if routing.num_rows == 0:
                _write_zeros(targets)
            else:
                self._add(pending, x, dout, targets)
        pending.x = pending.dout = pending.dz = pending.y1s = None

    def _add(
        self, pending: PendingWgrad, x: Tensor, dout: Tensor, targets: GradientTargets
    ) -> None:
        routing, settings = pending.routing, pending.settings
        biased = isinstance(targets, NativeBuffer) and targets.db1 is not None
        sizes = int(x.shape[1]), int(pending.y1s.shape[1])
        shape = _shape(sizes, settings, dtype_name(x.dtype), biased, x)
        calls = _calls(shape, x, settings)
        rows = index_of(calls, routing)
        # All memory is taken and all kernels are loaded before the first addition, so that running
        # out of memory leaves the targets as they were.
        places = triton_gradients.places(targets, calls)
        if places.dw2 is not None:
            calls.wgrad_down(dout, pending.y1s, places.dw2, rows).load()
        if places.dw1 is not None:
            calls.wgrad_up(x, pending.dz, places.dw1, rows).load()
        targets.adding = True
        if isinstance(targets, NativeBuffer) and targets.db1 is not None:
            calls.column_sums(dout, routing.row_prob, targets.db2, rows).launch()
            calls.column_sums(pending.dz, None, targets.db1, rows).launch()
        if places.dw2 is not None:
            with stage("dw2"):
                calls.wgrad_down(dout, pending.y1s, places.dw2, rows).launch()
        if settings.frees_stagewise:
            # The caller's local name keeps dout; what it owns of the engine's memory goes.
            pending.dout = pending.y1s = None
        if places.dw1 is not None:
            with stage("dw1"):
                calls.wgrad_up(x, pending.dz, places.dw1, rows).launch()
        targets.adding = False

    def problem_of(self, targets: ParameterTargets, settings: EngineSettings) -> str | None:
        """As the seam says; its GEMMs must be able to add there."""
        return triton_gradients.problem_of(targets)


def _restore_z(calls: Any, rows: Any, saved: Saved, weights: EngineWeights) -> Tensor:
    """z as forward wrote it, or computed again to the same bits."""
    if saved.z is not None:
        return plain_operand(saved.z)
    x, w1 = plain_tokens(saved.x), plain_operand(weights.w1)
    z = empty_rows(saved.routing, int(w1.shape[1]), x)
    calls.up(x, w1, weights.b1, z, None, rows).launch()
    return z


def _shown_dz(dz: Tensor, parts: int) -> Tensor:
    """`tap` of dz, which listeners know in (gate, up) pairs."""
    if not is_heard() or parts == 1:
        return tap("dz", dz)
    rows, inner = int(dz.shape[0]), int(dz.shape[1]) // parts
    pairs = dz.reshape([rows, parts, inner]).transpose(1, 2).reshape([rows, parts * inner])
    shown = tap("dz", pairs)
    if shown is pairs:
        return dz
    back = shown.reshape([rows, inner, parts]).transpose(1, 2).contiguous()
    return back.reshape([rows, parts * inner])


def _write_zeros(targets: GradientTargets) -> None:
    """No expert has a row: what is added to stays, and what is written is zeros."""
    if isinstance(targets, FreshTargets):
        for tensor in targets.tensors():
            tensor.zero_()


def _calls_of(weights: EngineWeights, settings: EngineSettings) -> Any:
    """The launches of a model with these weights."""
    w1 = plain_operand(weights.w1_dgrad)
    sizes = weights.hidden_size, weights.intermediate_size
    biased = weights.b2 is not None
    return _calls(_shape(sizes, settings, dtype_name(w1.dtype), biased, w1), w1, settings)


def _shape(
    sizes: tuple[int, int], settings: EngineSettings, dtype: str, bias: bool, tensor: Tensor
) -> ExpertShape:
    arch = _gpu(device_name(tensor)).arch
    own = settings.activation_parameters
    return ExpertShape(*sizes, settings.activation, dtype, bias, own, arch=arch)


def _calls(shape: ExpertShape, tensor: Tensor, settings: EngineSettings) -> Any:
    lent = settings.gemm_num_sms
    most = _gpu(device_name(tensor)).multiprocessors
    return _launches().calls(shape, lent if 0 < lent < most else 0)


def _index(weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata) -> Any:
    return index_of(_calls_of(weights, settings), routing)


def index_of(calls: Any, routing: RoutingMetadata) -> Any:
    """The rows of each expert as the kernels want them, made on the device."""
    device = device_of(routing.row_token)

    def empty(size: int) -> Tensor:
        return torch.empty((size,), dtype=torch.int32, device=device)

    module = _launches()
    rows = module.Rows(
        empty(routing.num_rows),
        empty(routing.num_rows // module.rows.TILE_ROWS),
        empty(routing.num_experts + 1),
        routing.padded_offsets,
        routing.num_rows,
        routing.num_experts,
    )
    calls.index_rows(routing.row_token, routing.expert_counts, rows).launch()
    return rows


@functools.cache
def _launches() -> Any:
    # Triton is imported when a kernel is wanted, and a machine without it can still load this file.
    from ..kernels.triton import launches

    if IS_PADDLE:
        take_driver_from_paddle()
    return launches


def _is_interpreted() -> bool:
    return bool(_launches().IS_INTERPRETED)


def _launch_scope(tensor: Tensor) -> AbstractContextManager[Any]:
    """The device of the caller: Triton launches on the current one, on its current stream."""
    # Under Paddle a process has one GPU, and `take_driver_from_paddle` names the stream.
    if IS_PADDLE or not is_cuda(tensor):
        return nullcontext()
    return torch.cuda.device(tensor.device)


class _Gpu(NamedTuple):
    """The properties of a GPU that launches depend on."""

    arch: str
    multiprocessors: int


@functools.lru_cache(maxsize=64)
def _gpu(device: str) -> _Gpu:
    if not device.startswith("cuda"):  # interpreted
        return _Gpu("sm_80", 1)
    index = int(device.partition(":")[2] or 0)
    properties = torch.cuda.get_device_properties(index)
    return _Gpu(arch_of(device), int(properties.multi_processor_count))
