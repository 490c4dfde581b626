"""The FP8 engine for Hopper: the `dx256` recipe on our own grouped GEMMs (`kernels/sm90`), gather,
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

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..enums import ZCode
from ..errors import ConfigError, ShapeError
from ..interop import (
    aligned,
    current_stream,
    device_name,
    device_of,
    empty,
    plain_ops,
)
from ..layouts import WeightSource
from ..observe import stage, tap
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.gpu import QuantizedWeights, SteadyWeights, to_scratch
from ..quant.tokens import anchor_of, to_bfloat16
from ..routing.metadata import RoutingMetadata
from .activations import pre_activation_width
from .bf16 import Bf16Engine
from .capabilities import HOPPER, Workload, require
from .hopper_passes import (
    Z_BLOCK,
    KeptZ,
    Passes,
    passes_on,
    prepared_handle,
    scratch,
    token_arguments,
    z_arguments,
)
from .interface import (
    Change,
    Engine,
    EngineSettings,
    EngineWeights,
    FreshTargets,
    GradientTargets,
    ParameterTargets,
    PendingWgrad,
    Saved,
    Tokens,
    check_dout,
    check_forward,
    check_weights,
    token_dtype,
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
            previous, store = None, _empty_store(settings)
        with stage("prepare_weights"), plain_ops():
            store.update(source, force=change is Change.YES)
            if previous is not None and previous.w1 is store.w1:
                return previous
            dgrad = (
                (store.w1, store.w2) if settings.iso_weight else (store.w1_dgrad, store.w2_dgrad)
            )
            return EngineWeights(store.w1, store.w2, *dgrad, store=store)

    def keep(self, previous: EngineWeights, change: Change) -> bool:
        """The comparison on the device that `refresh` launches too."""
        store = previous.store
        if not isinstance(store, QuantizedWeights) or previous.w1 is not store.w1:
            return False
        with stage("prepare_weights"):
            return store.keep()

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """Quantise native weights into the orders that forward and dgrad read."""
        check_weights(w1, w2, b1, b2, settings.activation)
        return self.refresh(WeightSource.stacked(w1, w2, b1, b2), settings)

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Quantise, two GEMMs, a weighted gather-and-sum; `save=False` stores no z. Tokens that come
        quantised are read as they are.
        """
        check_forward(x, routing, weights, settings, HOPPER)
        with plain_ops():
            x = _aligned(x)
            layer = _Layer(x, routing, weights, settings)
            z = layer.empty_z() if save and not settings.recompute_z else None
            out = empty(tuple(x.shape), token_dtype(x), device_of(anchor_of(x)))
            layer.forward(x, z, out)
            return tap("out", out), Saved(settings, routing, x, z) if save else None

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """Quantise dout, dgated with dprobs' sums, dgrad, an unweighted gather-and-sum. A dout that
        comes quantised is read as it is.
        """
        dout = check_dout(dout, saved, HOPPER)
        settings, routing = saved.settings, saved.routing
        with plain_ops():
            assert saved.x is not None
            x = _aligned(saved.x)  # which may have been copied since forward
            # Paddle's `to` takes as long as five launches, also where there is nothing to cast.
            if not isinstance(dout, BlockScaledTensor) and dout.dtype != token_dtype(x):
                dout = dout.to(token_dtype(x))
            dout = _aligned(dout)
            layer = _Layer(x, routing, weights, settings)
            z = layer.restored_z(x, saved)
            tokens = layer.dgated_tokens(x, dout)
            dz_scratch, dprobs, wgrad_dz, wgrad_y1s = layer.dgated(tokens, z)
            # Only now: where `dgated` finds no memory, the backward may be repeated.
            if settings.frees_stagewise:
                saved.z = None
            del z
            dx = tap("dx", layer.dgrad(dz_scratch, x))
            of_wgrad = tokens.x_codes or x, tokens.dout_codes or dout
            pending = PendingWgrad(settings, routing, *of_wgrad, wgrad_dz, wgrad_y1s)
            pending.native = layer.routed
            if tokens.row_scales is not None:
                pending.native = layer.routed._replace(row_scales=tokens.row_scales)
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Two GEMMs that add into the accumulators or the parameters' own memory, or write fresh
        memory, in FP8; in BF16 with `fp8_wgrad` off.
        """
        settings = pending.settings
        if any(operand is None for operand in (pending.x, pending.dout, pending.dz, pending.y1s)):
            raise RuntimeError(
                "the operands of these weight gradients were released by an earlier backward_dw"
            )
        if not settings.fp8_wgrad:
            if isinstance(pending.x, BlockScaledTensor):
                pending.x = to_bfloat16(pending.x)
            if isinstance(pending.dout, BlockScaledTensor):
                pending.dout = to_bfloat16(pending.dout)
            Bf16Engine().backward_dw(pending, targets)
            return
        with plain_ops():
            if isinstance(targets, FreshTargets) and pending.routing.num_rows == 0:
                for memory in targets.tensors():  # there is nothing to launch
                    memory.zero_()
                return
            passes = pending.native.passes
            both = targets.wants("dw1") and targets.wants("dw2")
            add = _add_both if both and not settings.frees_stagewise else _add_one_by_one
            add(passes, pending, targets, passes.gradients(targets))
        pending.x = pending.dout = pending.dz = pending.y1s = None

    def writes_gradients(self, settings: EngineSettings) -> bool:
        """With `fp8_wgrad` off the BF16 GEMMs compute them, which add."""
        return settings.fp8_wgrad

    def problem_of(self, targets: ParameterTargets, settings: EngineSettings) -> str | None:
        """As the seam says; the copy engine must be able to add there, and with `fp8_wgrad` off the
        BF16 GEMMs.
        """
        if not settings.fp8_wgrad:
            return Bf16Engine().problem_of(targets, settings)
        return targets.copy_engine_problem()


def _empty_store(settings: EngineSettings) -> QuantizedWeights:
    if _is_steady(settings):
        assert settings.recipe is not None
        return SteadyWeights(settings.recipe)
    return QuantizedWeights(settings.iso_weight)


def _is_steady(settings: EngineSettings) -> bool:
    """Whether scales stay along K in the GEMMs that gather: kernels of their own."""
    return settings.recipe is not None and settings.recipe.x.steady is not None


def _folds(settings: EngineSettings) -> bool:
    """Whether wgrad reads the codes of tokens (`quant.folding`)."""
    return settings.fp8_wgrad and settings.recipe is not None and settings.recipe.folds_wgrad


def _check_computable(source: WeightSource, settings: EngineSettings) -> None:
    inner, activation = source.intermediate_size, settings.activation
    workload = Workload(settings, source.hidden_size, inner, bias=source.b1 is not None)
    require(HOPPER, workload)
    if settings.iso_weight and settings.recipe and not settings.recipe.shares_weight_buffers:
        raise ConfigError(
            f"iso_weight keeps one copy of a weight, and recipe {settings.recipe.name!r} needs two"
        )
    width = pre_activation_width(inner, activation)
    if source.n1 != width:
        raise ShapeError(
            f"w1 has {source.n1} rows per expert; {activation.value} with I={inner} needs {width}"
        )


def _aligned(x: Tokens) -> Tokens:
    if not isinstance(x, BlockScaledTensor):
        return aligned(x)  # type: ignore[no-any-return]
    codes, scale_inv = aligned(x.codes), aligned(x.scale_inv)
    if codes is x.codes and scale_inv is x.scale_inv:
        return x
    return replace(x, codes=codes, scale_inv=scale_inv)


def _passes_of(anchor: Tensor, settings: EngineSettings) -> Passes:
    own = settings.activation_parameters
    of_device = device_name(anchor), settings.activation, own, settings.save_z
    return passes_on(*of_device, _is_steady(settings))


@dataclass(frozen=True)
class _DgatedTokens:
    """What dgated reads of tokens. Where wgrad reads their codes, `x_codes` and `dout_codes` are
    those that values are quantised into, and `row_scales` `[R, 2]` the largest of their rows, which
    dgated writes.
    """

    dout: Tokens
    x: Tokens | None = None
    x_codes: BlockScaledTensor | None = None
    dout_codes: BlockScaledTensor | None = None
    row_scales: Tensor | None = None


class _Layer:
    """The passes of one forward, or of one backward to the tokens, and what their arguments share.

    Holds handles of the routing and the weights, which the caller holds anyway, and no activation:
    what stage-wise memory frees between two passes is free.
    """

    def __init__(
        self, x: Tokens, routing: RoutingMetadata, weights: EngineWeights, settings: EngineSettings
    ) -> None:
        anchor = anchor_of(x)
        self._device, self._stream = device_of(anchor), current_stream(anchor)
        self._passes = _passes_of(anchor, settings)
        self._prepared = prepared = prepared_handle(self._passes, weights)
        self.routed = self._passes.routed(routing, prepared.hidden, prepared.inner)
        self._routing, self._weights, self._settings = routing, weights, settings

    def empty_z(self) -> KeptZ:
        """Unwritten `[R, 2I]`."""
        shape = (self._routing.num_rows, 2 * self._prepared.inner)
        if self._settings.save_z is ZCode.BF16:
            return empty(shape, torch.bfloat16, self._device)  # type: ignore[no-any-return]
        return BlockScaledTensor.empty(shape, Z_BLOCK, self._device, Code.INT8)

    def restored_z(self, x: Tokens, saved: Saved) -> KeptZ:
        """z as forward stored it, or computed again to the same bits."""
        if saved.z is None:
            z = self.empty_z()
            self.forward(x, z, None)
            return z
        return saved.z

    def forward(self, x: Tokens, z: KeptZ | None, out: Tensor | None) -> None:
        """Fills what there is of z `[R, 2I]` and out `[T, H]`."""
        bytes_of = self.routed.bytes_of
        size = bytes_of.forward_to_z if out is None else bytes_of.forward
        self._passes.forward(
            weights=self._prepared.handle,
            routing=self.routed.handle,
            stream=self._stream,
            multiprocessors=self._settings.gemm_num_sms,
            activation=self._passes.up_activations[self._settings.activation],
            **token_arguments("x", x),
            **z_arguments(z),
            out=out,
            scratch=scratch(size, self._device),
        )

    def dgated_tokens(self, x: Tokens, dout: Tokens) -> _DgatedTokens:
        """With memory for what outlives dgated."""
        settings, device = self._settings, self._device
        if not _folds(settings):
            return _DgatedTokens(dout)
        assert settings.recipe is not None
        block = settings.recipe.x.extent

        def codes_of(tokens: Tokens) -> BlockScaledTensor | None:
            if isinstance(tokens, BlockScaledTensor):
                return None  # they came as codes
            return BlockScaledTensor.empty(tuple(tokens.shape), block, device)

        row_scales = empty((self._routing.num_rows, 2), torch.float32, device)
        return _DgatedTokens(dout, x, codes_of(x), codes_of(dout), row_scales)

    def dgated(self, tokens: _DgatedTokens, z: KeptZ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(scratch that holds dz, dprobs [T, K], operands of wgrad: dz and y1s)`; the operands are
        bytes that the passes of wgrad read, or plain bf16 rows with `fp8_wgrad` off.
        """
        weights, bytes_of, device = self._dgrad_order("w2"), self.routed.bytes_of, self._device
        in_rows = not self._settings.fp8_wgrad
        dz_scratch = scratch(bytes_of.dz_scratch, device)
        has_codes = isinstance(tokens.dout, BlockScaledTensor) or tokens.dout_codes is not None
        dout_scratch = None if has_codes else scratch(bytes_of.dout_scratch, device)
        dprobs = empty((self._routing.num_tokens, self._routing.topk), torch.float32, device)
        if in_rows:
            rows, inner = self._routing.num_rows, self._prepared.inner
            dz, y1s = (empty((rows, n), torch.bfloat16, device) for n in (2 * inner, inner))
        else:
            dz, y1s = scratch(bytes_of.dz, device), scratch(bytes_of.y1s, device)
        self._passes.dgated(
            weights=weights,
            routing=self.routed.handle,
            stream=self._stream,
            multiprocessors=self._settings.gemm_num_sms,
            activation=self._passes.dgated_activations[self._settings.activation],
            **token_arguments("x", tokens.x, tokens.x_codes),
            **token_arguments("dout", tokens.dout, tokens.dout_codes),
            row_scales=tokens.row_scales,
            **z_arguments(z),
            dz=None if in_rows else dz,
            y1s=None if in_rows else y1s,
            dz_rows=dz if in_rows else None,
            y1s_rows=y1s if in_rows else None,
            dprobs=dprobs,
            dz_scratch=dz_scratch,
            dout_scratch=dout_scratch,
        )
        return dz_scratch, dprobs, dz, y1s

    def dgrad(self, dz_scratch: Tensor, x: Tokens) -> Tensor:
        """dx `[T, H]` in `token_dtype` of `x`, from the scratch that `dgated` left."""
        weights = self._dgrad_order("w1")
        dx = empty(tuple(x.shape), token_dtype(x), self._device)
        self._passes.dgrad(
            weights=weights,
            routing=self.routed.handle,
            stream=self._stream,
            multiprocessors=self._settings.gemm_num_sms,
            dx=dx,
            dz_scratch=dz_scratch,
            scratch=scratch(self.routed.bytes_of.dgrad, self._device),
        )
        return dx

    def _dgrad_order(self, name: str) -> Any:
        """The handle of weights whose contraction over forward's rows is contiguous; under
        `iso_weight` of one matrix, transposed into a shared scratch, for the next launch only.
        """
        held: Any = getattr(self._weights, f"{name}_dgrad")
        if held.orientation is Orientation.COLUMNS:
            return self._prepared.handle
        return self._passes.weights_of({f"{name}_dgrad": to_scratch(held, name)})


def _launch_of(pending: PendingWgrad) -> dict[str, Any]:
    """The arguments that all passes of these weight gradients share. They keep no operand alive."""
    return {
        "weights": None,
        "routing": pending.native.handle,
        "stream": current_stream(anchor_of(pending.x)),
        "multiprocessors": pending.settings.gemm_num_sms,
        "shares_gpu": pending.shares_gpu,
        "inner": pending.native.inner,
        "row_scales": pending.native.row_scales,
    }


def _add_both(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any]
) -> None:
    """Both weight gradients."""
    x, launch = pending.x, _launch_of(pending)
    memory = scratch(pending.native.bytes_of.wgrad, device_of(anchor_of(x)))
    targets.adding = True
    passes.wgrad(
        **launch,
        **token_arguments("x", x),
        **token_arguments("dout", pending.dout),
        **gradients,
        dz=pending.dz,
        y1s=pending.y1s,
        scratch=memory,
    )
    targets.adding = False


def _add_one_by_one(
    passes: Passes, pending: PendingWgrad, targets: GradientTargets, gradients: dict[str, Any]
) -> None:
    """The same, one product after the other: each frees its operands before the next begins, so
    that the other's need not lie beside its own. A product that nobody wants is left out.
    """
    bytes_of, launch = pending.native.bytes_of, _launch_of(pending)
    dout, y1s = pending.dout, pending.y1s
    # One scratch serves both products. The second must not have to ask for memory when the first
    # has been added already.
    memory = scratch(max(bytes_of.dw1, bytes_of.dw2), device_of(anchor_of(dout)))
    targets.adding = True
    pending.dout = pending.y1s = None
    if targets.wants("dw2"):
        passes.dw2(
            **launch,
            **token_arguments("dout", dout),
            dw2=gradients["dw2"],
            into_dw2=gradients["into_dw2"],
            y1s=y1s,
            scratch=memory,
        )
    del dout, y1s
    x = pending.x
    if targets.wants("dw1"):
        passes.dw1(
            **launch,
            **token_arguments("x", x),
            dw1=gradients["dw1"],
            into_dw1=gradients["into_dw1"],
            dz=pending.dz,
            scratch=memory,
        )
    targets.adding = False
