"""The FP8 engine for Hopper: the `iso128` recipe on our own grouped GEMMs (`kernels/sm90`), gather, activation and quantisation fused.

    forward       x_fp8          y1, z = up(x_fp8)           y2 = down(y1)     out = weighted sum per token
    backward_dx   dout_fp8       dz, y1s, dprobs = dgated(dout_fp8, z)         dx = sum per token of dgrad(dz)
    backward_dw   x^T, dout^T    dw2 += dout^T y1s           dw1 += dz^T x

Tokens are quantised once and gathered inside the GEMMs: no `[R, H]` copy of them exists. Quantisation points, blocks and codes are
those of the reference engine; results differ by the order of additions (and dz, y1s by a rounding to bf16 on their way to FP8).
Waits for nothing, allocates by `routing.num_rows`, adds in a fixed order: equal calls give equal bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..diagnostics.stages import stage, tap
from ..enums import ActivationType, ZCode
from ..errors import ConfigError, ShapeError, expect
from ..interop import aligned, current_stream, device_name, dtype_name, plain_ops
from ..kernels.limits import FP8_RECIPE, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE
from ..kernels.sm90 import fp8_dgated_source, fp8_grouped_gemm_source, fp8_wgrad_source, missing_tool
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.gpu import QuantizedWeights, quantize_rows, to_scratch
from ..quant.gpu_wgrad import gather_transpose_quantize, gather_transpose_quantize_pair
from ..quant.recipes import iso, rows
from ..routing.backends import arch_of
from ..routing.gpu import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from .activations import pre_activation_width
from .bf16 import HOPPER, Bf16Engine, bf16_unavailable
from .interface import (
    Engine,
    EngineSettings,
    EngineWeights,
    GradAccumulators,
    PendingWgrad,
    Saved,
    WeightSource,
    check_dout,
    check_forward,
    check_weights,
)

Tensor = torch.Tensor

ACTIVATIONS = {ActivationType.SWIGLU: 0, ActivationType.GEGLU: 1, ActivationType.REGLU: 2}  # as the kernels number them
_ROWS, _BLOCK = rows(128), iso(128)
_DPROB_COLUMNS = 256  # of dy1 in one partial sum: a tile's


class HopperEngine(Engine):
    """See the module docstring. bfloat16 tokens and weights, no biases; `hopper_unavailable` says what else it needs."""

    name = "hopper"
    follows_weights = True

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """Quantise native weights into the orders that forward and dgrad read."""
        check_weights(w1, w2, b1, b2, settings.activation)
        expect(b1 is None, ConfigError, "the hopper engine has no biases; needed: b1 and b2 None")
        ups, downs = tuple(w1.detach().contiguous().unbind(0)), tuple(w2.detach().contiguous().unbind(0))
        return self.prepare_source(WeightSource(ups, downs, transposed=False, split_half=False), settings, None, True)

    def prepare_source(
        self, source: WeightSource, settings: EngineSettings, previous: EngineWeights | None, changed: bool
    ) -> EngineWeights:
        """Quantise the weights where they lie; `previous` is brought up to date in place, on the device, if they differ.

        Raises:
            ConfigError: the settings are not this engine's.
            DTypeError, ShapeError, LayoutError, DeviceError: naming the weight that cannot be read in place.
        """
        problem = settings_problem(settings)
        expect(problem is None, ConfigError, f"the hopper engine cannot compute these settings: {problem}")
        width = pre_activation_width(source.intermediate_size, settings.activation)
        expect(
            source.n1 == width,
            ShapeError,
            f"w1 has {source.n1} rows per expert; {settings.activation.value} with I={source.intermediate_size} needs {width}",
        )
        reusable = previous is not None and isinstance(previous.store, QuantizedWeights)
        store = previous.store if reusable and previous is not None else QuantizedWeights(settings.iso_weight)
        with stage("prepare_weights"), plain_ops():
            store.update(source, force=changed)
            if reusable and previous is not None and previous.w1 is store.w1:
                return previous
            dgrad = (store.w1, store.w2) if settings.iso_weight else (store.w1_dgrad, store.w2_dgrad)
            return EngineWeights(store.w1, store.w2, *dgrad, store=store)

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
            with stage("quantize_x"):
                x_fp8 = tap("x_fp8", quantize_rows(x))
            y1, z = _up(x_fp8, routing, weights, settings, store_z=save and not settings.recompute_z)
            y2 = _plain_gemm("down", y1, _scaled(weights.w2), routing)
            with stage("aggregate_out"):
                out = tap("out", aggregate(tap("y2", y2), routing, weighted=True, dtype=x.dtype))
            return out, Saved(settings, routing, x, z) if save else None

    def backward_dx(self, dout: Tensor, saved: Saved, weights: EngineWeights) -> tuple[Tensor, Tensor, PendingWgrad]:
        """Quantise dout, dgated with dprobs' sums, dgrad, an unweighted gather-and-sum."""
        dout = check_dout(dout, saved)
        settings, routing, x = saved.settings, saved.routing, saved.x
        assert x is not None
        with plain_ops():
            dout = aligned(dout.to(x.dtype))
            z = _restore_z(saved, weights)
            if settings.frees_stagewise:
                saved.z = None
            gradients = _dgated(dout, z, routing, _dgrad_order(weights, "w2"), settings)
            del z
            dx_rows = _plain_gemm("dx_gemm", gradients.dz, _dgrad_order(weights, "w1"), routing)
            with stage("aggregate_dx"):
                dx = tap("dx", aggregate(tap("dx_rows", dx_rows), routing, weighted=False, dtype=x.dtype))
                dprobs = tap("ds", scatter_to_slots(gradients.row_dprob, routing))
            pending = PendingWgrad(settings, routing, x, dout, gradients.wgrad_dz, gradients.wgrad_y1s)
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, accumulators: GradAccumulators) -> None:
        """Two GEMMs that add into the accumulators, in FP8, or in BF16 with `fp8_wgrad` off."""
        settings, routing = pending.settings, pending.routing
        x, dout, dz, y1s = pending.x, pending.dout, pending.dz, pending.y1s
        if x is None or dout is None or dz is None or y1s is None:
            raise RuntimeError("the operands of these weight gradients were released by an earlier backward_dw")
        if not settings.fp8_wgrad:
            Bf16Engine().backward_dw(pending, accumulators)
            return
        assert isinstance(dz, BlockScaledTensor) and isinstance(y1s, BlockScaledTensor)
        with plain_ops():
            index = (routing.row_token, routing.padded_offsets)
            if settings.frees_stagewise:
                pending.dout = pending.y1s = None
                with stage("wgrad_operands"):
                    dout_t = tap("wgrad_dout", gather_transpose_quantize(dout, *index))
                _wgrad("dw2", dout_t, y1s, pending, accumulators.dw2)
                del dout_t, dout, y1s
                with stage("wgrad_operands"):
                    x_t = tap("wgrad_x", gather_transpose_quantize(x, *index))
            else:
                with stage("wgrad_operands"):
                    x_t, dout_t = gather_transpose_quantize_pair(x, dout, *index)
                x_t, dout_t = tap("wgrad_x", x_t), tap("wgrad_dout", dout_t)
                _wgrad("dw2", dout_t, y1s, pending, accumulators.dw2)
            _wgrad("dw1", dz, x_t, pending, accumulators.dw1)
        pending.x = pending.dout = pending.dz = pending.y1s = None


def settings_problem(settings: EngineSettings) -> str | None:
    """What of the settings this engine does not compute, or None."""
    if settings.recipe is None:
        return "FP8 is off"
    if settings.recipe.name != FP8_RECIPE:
        return f"the recipe is {settings.recipe.name!r}, and its kernels are made for {FP8_RECIPE!r}"
    if settings.activation not in ACTIVATIONS:
        names = [activation.value for activation in ACTIVATIONS]
        return f"the activation is {settings.activation.value!r}, and it has {names}"
    if settings.save_z is not ZCode.INT8:
        return f"z is saved as {settings.save_z.value!r}, and it stores {ZCode.INT8.value!r}"
    return None


def hopper_unavailable(
    device: str,
    settings: EngineSettings,
    dtype: Any = "bfloat16",
    sizes: tuple[int, int] | None = None,
    bias: bool = False,
) -> str | None:
    """Why the Hopper engine cannot run, in words fit for a log line, or None where it can.

    Args:
        device: of the tensors: "cpu", "cuda:0".
        settings: what is to be computed.
        dtype: of tokens and weights, a dtype or its name.
        sizes: (H, I) where known.
        bias: whether the experts have biases.
    """
    if not device.startswith("cuda"):
        return f"no GPU: tensors are on {device}"
    capability = tuple(torch.cuda.get_device_capability(int(device.partition(":")[2] or 0)))
    if capability != HOPPER:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, and its GEMMs are for Hopper (9.0)"
    if dtype_name(dtype) != "bfloat16":
        return f"tokens are {dtype_name(dtype)}, and it takes bfloat16"
    if bias:
        return "the experts have biases, and it has none"
    if sizes is not None:
        hidden, inner = sizes
        if hidden % HIDDEN_MULTIPLE or inner % INTERMEDIATE_MULTIPLE:
            needed = f"multiples of {HIDDEN_MULTIPLE} and {INTERMEDIATE_MULTIPLE}"
            return f"H is {hidden} and I is {inner}, and it needs {needed}"
    problem = settings_problem(settings) or missing_tool()
    if problem is None and not settings.fp8_wgrad:
        reason = bf16_unavailable(device)
        problem = f"fp8_wgrad is off and the BF16 weight gradients cannot run: {reason}" if reason else None
    return problem


@dataclass(eq=False)
class _Gradients:
    """What dgated leaves: dz `[R, 2I]` for dgrad, fp32 row_dprob `[R]`, and the operands of wgrad, token-major or plain bf16."""

    dz: BlockScaledTensor
    row_dprob: Tensor
    wgrad_dz: Any
    wgrad_y1s: Any


@functools.lru_cache(maxsize=64)
def _kernels(device: str) -> tuple[Any, Any, Any]:
    """The compiled modules (GEMMs, dgated, wgrad); errors as `CudaSource.load`."""
    arch = arch_of(device)
    return fp8_grouped_gemm_source(arch).load(), fp8_dgated_source(arch).load(), fp8_wgrad_source(arch).load()


def _scaled(operand: Any) -> BlockScaledTensor:
    """`check_forward` has refused plain weights."""
    assert isinstance(operand, BlockScaledTensor)
    return operand


def _dgrad_order(weights: EngineWeights, name: str) -> BlockScaledTensor:
    """The weight with its contraction over forward's rows contiguous; under `iso_weight` transposed into a shared scratch."""
    held = _scaled(getattr(weights, f"{name}_dgrad"))
    return to_scratch(held, name) if held.orientation is Orientation.ROWS else held


def _up(
    x: BlockScaledTensor, routing: RoutingMetadata, weights: EngineWeights, settings: EngineSettings, *, store_z: bool
) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
    """`(y1 [R, I], z [R, 2I] or None)`."""
    r, inner, device = routing.num_rows, weights.intermediate_size, x.codes.device
    w1 = _scaled(weights.w1)
    y1 = BlockScaledTensor.empty((r, inner), _ROWS, device)
    z = BlockScaledTensor.empty((r, 2 * inner), _ROWS, device, Code.INT8) if store_z else y1
    with stage("up"):
        _kernels(device_name(y1.codes))[0].gather_gated_gemm(
            x.bytes, x.scale_inv, w1.bytes, w1.scale_inv, routing.row_token, routing.padded_offsets,
            z.bytes, z.scale_inv, y1.bytes, y1.scale_inv, ACTIVATIONS[settings.activation], store_z, current_stream(y1.codes),
        )  # fmt: skip
    saved = tap("z", z) if store_z else None
    return tap("y1", y1), saved


def _restore_z(saved: Saved, weights: EngineWeights) -> BlockScaledTensor:
    """z as forward stored it, or computed again to the same bits."""
    if saved.z is None:
        assert saved.x is not None
        saved_z = _up(quantize_rows(saved.x), saved.routing, weights, saved.settings, store_z=True)[1]
        return _scaled(saved_z)
    return _scaled(saved.z)


def _plain_gemm(name: str, a: BlockScaledTensor, w: BlockScaledTensor, routing: RoutingMetadata) -> Tensor:
    """bf16 `[R, N]` = a `[R, K]` times the weights of each row's expert, stored `[E, N, K]`."""
    n = int(w.codes.shape[1])
    out = torch.empty((routing.num_rows, n), dtype=torch.bfloat16, device=a.codes.device)
    with stage(name):
        _kernels(device_name(out))[0].grouped_gemm(
            a.bytes, a.scale_inv, w.bytes, w.scale_inv, routing.padded_offsets, out, current_stream(out)
        )
    return out


def _dgated(
    dout: Tensor, z: BlockScaledTensor, routing: RoutingMetadata, w2: BlockScaledTensor, settings: EngineSettings
) -> _Gradients:
    r, inner, device = routing.num_rows, int(w2.codes.shape[1]), dout.device
    with stage("quantize_dout"):
        dout_fp8 = tap("dout_fp8", quantize_rows(dout))
    dz = BlockScaledTensor.empty((r, 2 * inner), _BLOCK, device)
    parts = torch.empty((-(-inner // _DPROB_COLUMNS), r), dtype=torch.float32, device=device)
    operands: list[Any]
    if settings.fp8_wgrad:
        columns = Orientation.COLUMNS
        operands = [BlockScaledTensor.empty((n, r), _BLOCK, device, orientation=columns) for n in (2 * inner, inner)]
        outputs = [tensor for q in operands for tensor in (q.bytes, q.scale_inv)]
    else:  # plain operands; scales are not written
        operands = [torch.empty((r, n), dtype=torch.bfloat16, device=device) for n in (2 * inner, inner)]
        outputs = [tensor for operand in operands for tensor in (operand, parts)]
    with stage("dgated"):
        _kernels(device_name(parts))[1].gather_dgated_gemm(
            dout_fp8.bytes, dout_fp8.scale_inv, w2.bytes, w2.scale_inv, routing.row_token, routing.row_prob,
            routing.padded_offsets, z.bytes, z.scale_inv, dz.bytes, dz.scale_inv, parts, *outputs,
            not settings.fp8_wgrad, ACTIVATIONS[settings.activation], current_stream(parts),
        )  # fmt: skip
    row_dprob = tap("row_dprob", parts.sum(0))
    return _Gradients(tap("dz_fp8", dz), row_dprob, tap("dz", operands[0]), tap("y1s", operands[1]))


def _wgrad(name: str, a: BlockScaledTensor, b: BlockScaledTensor, pending: PendingWgrad, accumulator: Tensor) -> None:
    """`accumulator[e] += a_e^T b_e` over the rows of each expert; both operands token-major."""
    offsets, shares_gpu = pending.routing.padded_offsets, pending.shares_gpu
    with stage(name):
        _kernels(device_name(accumulator))[2].grouped_wgrad(
            a.bytes, a.scale_inv, b.bytes, b.scale_inv, offsets, accumulator, shares_gpu, current_stream(accumulator)
        )
