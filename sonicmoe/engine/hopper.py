"""The FP8 engine for Hopper: the `iso128` recipe on our own grouped GEMMs (`kernels/sm90`), gather,
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

from typing import Any

import torch

from ..diagnostics.stages import stage, tap
from ..errors import ShapeError
from ..interop import aligned, device_name, device_of, empty, plain_ops
from ..layouts import WeightSource
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.gpu import QuantizedWeights, to_scratch
from ..routing.metadata import RoutingMetadata
from .activations import pre_activation_width
from .bf16 import Bf16Engine
from .capabilities import HOPPER, Workload, require
from .hopper_passes import BY_BLOCKS, BY_ROWS, launch, passes_on, scratch
from .interface import (
    Change,
    Engine,
    EngineSettings,
    EngineWeights,
    GradientTargets,
    NativeBuffer,
    PendingWgrad,
    Saved,
    check_dout,
    check_forward,
    check_weights,
    native_buffer,
)

Tensor = torch.Tensor


class HopperEngine(Engine):
    """See the module docstring; `capabilities.HOPPER` says what it takes."""

    name = "hopper"

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        change: Change = Change.YES,
    ) -> EngineWeights:
        """Quantise the weights where they lie. `previous` is brought up to date in place: at every
        call a kernel compares a sample of the weights with checksums, and the next one quantises
        them where they differ. That also happens at every replay of a CUDA graph.

        Raises:
            ConfigError: the settings are not this engine's, or there are biases.
            DTypeError, ShapeError, LayoutError, DeviceError: naming the weight that cannot be read
            in place.
        """
        if previous is None:  # else the same settings were checked when it was made
            _check_computable(source, settings)
        store = None if previous is None else previous.store
        if not isinstance(store, QuantizedWeights):
            previous, store = None, QuantizedWeights(settings.iso_weight)
        with stage("prepare_weights"), plain_ops():
            store.update(source, force=change is Change.YES)
            if previous is not None and previous.w1 is store.w1:
                return previous
            dgrad = (
                (store.w1, store.w2) if settings.iso_weight else (store.w1_dgrad, store.w2_dgrad)
            )
            return EngineWeights(store.w1, store.w2, *dgrad, store=store)

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """Quantise native weights into the orders that forward and dgrad read."""
        check_weights(w1, w2, b1, b2, settings.activation)
        return self.refresh(WeightSource.stacked(w1, w2, b1, b2), settings)

    def forward(
        self,
        x: Tensor,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Quantise, two GEMMs, a weighted gather-and-sum; `save=False` stores no z."""
        check_forward(x, routing, weights, settings)
        with plain_ops():
            x = aligned(x)
            z = _empty_z(routing, weights) if save and not settings.recompute_z else None
            out = empty(tuple(x.shape), x.dtype, device_of(x))
            _forward(x, routing, weights, settings, z, out)
            return tap("out", out), Saved(settings, routing, x, z) if save else None

    def backward_dx(
        self, dout: Tensor, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """Quantise dout, dgated with dprobs' sums, dgrad, an unweighted gather-and-sum."""
        dout = check_dout(dout, saved)
        settings, routing = saved.settings, saved.routing
        assert saved.x is not None
        with plain_ops():
            x = aligned(saved.x)  # which may have been copied since forward
            dout = aligned(dout.to(x.dtype))
            z = _restore_z(x, saved, weights)
            if settings.frees_stagewise:
                saved.z = None
            dz, dprobs, wgrad_dz, wgrad_y1s = _dgated(
                dout, z, routing, _dgrad_order(weights, "w2"), settings
            )
            del z
            dx = tap("dx", _dgrad(dz, x, routing, _dgrad_order(weights, "w1")))
            pending = PendingWgrad(settings, routing, x, dout, wgrad_dz, wgrad_y1s)
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Two GEMMs that add into the accumulators, in FP8, or in BF16 with `fp8_wgrad` off."""
        sums, settings = native_buffer(targets), pending.settings
        x, dout, dz, y1s = pending.x, pending.dout, pending.dz, pending.y1s
        if x is None or dout is None or dz is None or y1s is None:
            raise RuntimeError(
                "the operands of these weight gradients were released by an earlier backward_dw"
            )
        if not settings.fp8_wgrad:
            Bf16Engine().backward_dw(pending, sums)
            return
        assert isinstance(dz, BlockScaledTensor) and isinstance(y1s, BlockScaledTensor)
        with plain_ops():
            if settings.frees_stagewise:
                pending.dout = pending.y1s = None
                _wgrad_of(dout, y1s, pending, sums.dw2, is_dw2=True)
                del dout, y1s
                _wgrad_of(x, dz, pending, sums.dw1, is_dw2=False)
            else:
                _wgrad(x, dout, dz, y1s, pending, sums)
        pending.x = pending.dout = pending.dz = pending.y1s = None


def _check_computable(source: WeightSource, settings: EngineSettings) -> None:
    inner, activation = source.intermediate_size, settings.activation
    workload = Workload(settings, source.hidden_size, inner, bias=source.b1 is not None)
    require(HOPPER, workload)
    width = pre_activation_width(inner, activation)
    if source.n1 != width:
        raise ShapeError(
            f"w1 has {source.n1} rows per expert; {activation.value} with I={inner} needs {width}"
        )


def _scaled(operand: Any) -> BlockScaledTensor:
    """`check_forward` has refused plain weights."""
    assert isinstance(operand, BlockScaledTensor)
    return operand


def _dgrad_order(weights: EngineWeights, name: str) -> BlockScaledTensor:
    """The weight with its contraction over forward's rows contiguous; under `iso_weight` transposed
    into a shared scratch.
    """
    held = _scaled(getattr(weights, f"{name}_dgrad"))
    return to_scratch(held, name) if held.orientation is Orientation.ROWS else held


def _empty_z(routing: RoutingMetadata, weights: EngineWeights) -> BlockScaledTensor:
    """Unwritten `[R, 2I]`."""
    shape = (routing.num_rows, 2 * weights.intermediate_size)
    return BlockScaledTensor.empty(shape, BY_ROWS, device_of(routing.row_token), Code.INT8)


def _forward(
    x: Tensor,
    routing: RoutingMetadata,
    weights: EngineWeights,
    settings: EngineSettings,
    z: BlockScaledTensor | None,
    out: Tensor | None,
) -> None:
    """Fills what there is of z `[R, 2I]` and out `[T, H]`."""
    passes, w1, w2 = passes_on(device_name(x)), _scaled(weights.w1), _scaled(weights.w2)
    (tokens, hidden), inner = (int(size) for size in x.shape), weights.intermediate_size
    memory = scratch(
        passes.sizes.forward_bytes(tokens, routing.num_rows, hidden, inner, out is None),
        device_of(x),
    )
    stored = (None, None) if z is None else (z.bytes, z.scale_inv)
    launch(
        passes.forward, x, routing.row_token, routing.padded_offsets, routing.slot_row, routing.row_prob, w1.bytes, w1.scale_inv,
        w2.bytes, w2.scale_inv, *stored, memory, out, passes.up_activations[settings.activation], scratches=(memory, *stored),
    )  # fmt: skip


def _restore_z(x: Tensor, saved: Saved, weights: EngineWeights) -> BlockScaledTensor:
    """z as forward stored it, or computed again to the same bits."""
    if saved.z is None:
        z = _empty_z(saved.routing, weights)
        _forward(x, saved.routing, weights, saved.settings, z, None)
        return z
    return _scaled(saved.z)


def _dgated(
    dout: Tensor,
    z: BlockScaledTensor,
    routing: RoutingMetadata,
    w2: BlockScaledTensor,
    settings: EngineSettings,
) -> tuple[Tensor, Tensor, Any, Any]:
    """`(scratch that holds dz, dprobs [T, K], operands of wgrad: dz and y1s, token-major or plain
    bf16)`.
    """
    passes, device = passes_on(device_name(dout)), device_of(dout)
    (tokens, hidden), r, inner = (
        (int(size) for size in dout.shape),
        routing.num_rows,
        int(w2.codes.shape[1]),
    )
    memory = scratch(passes.sizes.dgated_bytes(r, inner), device)
    dout_fp8 = scratch(passes.sizes.tokens_bytes(tokens, hidden), device)
    dprobs = empty((tokens, routing.topk), torch.float32, device)
    operands: list[Any]
    if settings.fp8_wgrad:
        columns = Orientation.COLUMNS
        operands = [
            BlockScaledTensor.empty((n, r), BY_BLOCKS, device, orientation=columns)
            for n in (2 * inner, inner)
        ]
        outputs = [tensor for q in operands for tensor in (q.bytes, q.scale_inv)]
    else:
        operands = [empty((r, n), torch.bfloat16, device) for n in (2 * inner, inner)]
        outputs = [operands[0], None, operands[1], None]
    launch(
        passes.dgated, dout, routing.row_token, routing.row_prob, routing.padded_offsets, routing.slot_row, w2.bytes, w2.scale_inv,
        z.bytes, z.scale_inv, *outputs, not settings.fp8_wgrad, memory, dout_fp8, dprobs,
        passes.dgated_activations[settings.activation],
        scratches=(memory, dout_fp8),
    )  # fmt: skip
    return memory, tap("ds", dprobs), tap("dz", operands[0]), tap("y1s", operands[1])


def _dgrad(dz: Tensor, x: Tensor, routing: RoutingMetadata, w1: BlockScaledTensor) -> Tensor:
    """dx `[T, H]` in the dtype of `x`, from the scratch that `_dgated` left."""
    passes, hidden = passes_on(device_name(x)), int(x.shape[1])
    dx = empty(tuple(x.shape), x.dtype, device_of(x))
    memory = scratch(passes.sizes.dgrad_bytes(routing.num_rows, hidden), device_of(x))
    launch(
        passes.dgrad, dz, w1.bytes, w1.scale_inv, routing.padded_offsets, routing.slot_row, routing.row_prob, memory, dx,
        scratches=(memory,),
    )  # fmt: skip
    return dx


def _wgrad(
    x: Tensor,
    dout: Tensor,
    dz: BlockScaledTensor,
    y1s: BlockScaledTensor,
    pending: PendingWgrad,
    sums: NativeBuffer,
) -> None:
    """Both weight gradients, added to the sums."""
    passes, routing = passes_on(device_name(x)), pending.routing
    memory = scratch(passes.sizes.wgrad_bytes(routing.num_rows, int(x.shape[1]), 2), device_of(x))
    launch(
        passes.wgrad, x, dout, routing.row_token, routing.padded_offsets, dz.bytes, dz.scale_inv, y1s.bytes, y1s.scale_inv,
        sums.dw1, sums.dw2, memory, pending.shares_gpu, scratches=(memory,),
    )  # fmt: skip


def _wgrad_of(
    tokens: Tensor,
    rows: BlockScaledTensor,
    pending: PendingWgrad,
    accumulator: Tensor,
    *,
    is_dw2: bool,
) -> None:
    """dw2 from dout and y1s, or dw1 from x and dz, added to the accumulator."""
    passes, routing = passes_on(device_name(tokens)), pending.routing
    memory = scratch(
        passes.sizes.wgrad_bytes(routing.num_rows, int(tokens.shape[1]), 1), device_of(tokens)
    )
    launch(
        passes.wgrad_of, tokens, routing.row_token, routing.padded_offsets, rows.bytes, rows.scale_inv, accumulator, is_dw2, memory,
        pending.shares_gpu, scratches=(memory,),
    )  # fmt: skip
