"""The native passes of the Hopper engine: handles and arguments by keyword, scratch, and the stages
that listeners see.

`kernels/host/passes.cpp` says what each pass launches, and `kernels/host/handles.hpp` which tensors
each handle takes. Their order is written there alone: `by_keyword` asks for the names, so that a
call from here can neither mix up two tensors nor forget one.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..enums import ActivationType, ZCode
from ..errors import ConfigError, ShapeError, expect
from ..interop import device_of
from ..kernels import aggregate_source, routing_metadata_source
from ..kernels.cuda_quantize import quantize_source
from ..kernels.cuda_wgrad import (
    bias_gradients_source,
    low_rank_source,
    wgrad_operands_source,
)
from ..kernels.host import passes_source
from ..kernels.sm90 import gemm_sources, launch_parameters
from ..quant.format import BlockScaledTensor, Orientation
from ..quant.recipes import RECIPES
from ..routing.backends import arch_of
from ..routing.metadata import ROW_ALIGNMENT, RoutingMetadata
from .factor_operands import FactorOperands
from .interface import EngineSettings, EngineWeights
from .low_rank import Adapters
from .native_calls import by_keyword
from .targets import GradientTargets
from .wgrad_destinations import wgrad_destination

Tensor = torch.Tensor
KeptZ = BlockScaledTensor | Tensor  # 8-bit codes, or bf16
RECIPE = RECIPES["dx256"]
# `Passes` refuses kernels that were built for others.
SCALE_BLOCK, GATE_UP_BLOCK = RECIPE.w2.rows, RECIPE.w1.rows
Z_BLOCK = RECIPE.z


MAX_SIZES = 1024  # of scratch, kept for one device: a step has as many as batches in flight
_WEIGHTS = ("w1", "w2", "w1_dgrad", "w2_dgrad")
# Of adapters: as forward reads them, and transposed for the backward.
_OF_FORWARD = "up_a", "up_b", "down_a", "down_b"
FACTORS = *_OF_FORWARD, *(f"{name}_t" for name in _OF_FORWARD)
_LOW_RANK = "narrow_rows narrow_gradient narrow_both gradient_parts parts_of_both prepare_factor"


class PreparedHandle(NamedTuple):
    """The native handle of prepared weights, with their H and I, and the passes that take it under
    these settings. has_dgrad: the handle refers to backward's order too, which `iso_weight` does
    not keep. up, dgated: the arguments of a pass that say which activation it computes.
    """

    handle: Any
    hidden: int
    inner: int
    has_dgrad: bool
    passes: Passes
    settings: EngineSettings
    up: dict[str, Any]
    dgated: dict[str, Any]
    adapters: Adapters | None = None
    of_backward: bool = False


class Routed(NamedTuple):
    """The handle of a routing, the bytes of each scratch of a layer, by name, I, the passes that
    take them, and the device.
    """

    handle: Any
    bytes_of: Any
    inner: int
    passes: Passes
    device: Any


class Passes:
    """The passes over one set of kernels; each takes its arguments by keyword, and so do `weights`
    and `routing`, which make the handles. A handle owns references to its tensors.
    """

    def __init__(
        self,
        native: Any,
        activations: tuple[Iterable[Any], Iterable[Any]],
        kernels: Mapping[str, Any],
    ) -> None:
        """The passes of one device.

        Args:
            native: the loaded module.
            activations: what the modules of the up projection and of dgated export as
                `activation_names`.
            kernels: functions by the names their modules export, and `wgrad_destination`, which
                makes what `grouped_wgrad` adds to.
        """
        # A kernel of other blocks would read scales at wrong places without an error.
        _check_numbers(native.numbers())
        self._activations = [tuple(map(str, exported)) for exported in activations]

        def names(of: str) -> list[str]:
            return [str(name) for name in native.argument_names(of)]

        # In the order that C++ asks for: Python keeps no second list.
        functions = [kernels[name] for name in names("kernels")]
        make_pass = native.make_pass()
        self.weights = by_keyword(native.weights(), names("weights"))
        self.routing = by_keyword(native.routing(), names("routing"))
        self._routing_in = native.routing_in
        passes = "forward", "dgated", "dgrad", "wgrad", "dw1", "dw2", "adapters"
        self.forward, self.dgated, self.dgrad, self.wgrad, self.dw1, self.dw2, self.adapters = (
            by_keyword(make_pass(name, *functions), names(name)) for name in passes
        )
        self.kernels = kernels
        self._make_destination: Any = kernels.get("wgrad_destination")
        named: Any = namedtuple("ScratchBytes", names("scratches"))  # type: ignore[misc]
        self._ask_for_sizes = native.scratch_sizes
        self._named_sizes = named._make
        self._sizes: dict[tuple[int, ...], Any] = {}

    def routed(self, routing: RoutingMetadata, hidden: int, inner: int) -> Routed:
        """What the passes of one forward, or of one backward, need to know of `routing`.

        Nobody keeps it longer than the metadata: it would keep their memory.
        """
        if routing.memory is None:
            handle = self.routing(
                row_token=routing.row_token,
                padded_offsets=routing.padded_offsets,
                slot_row=routing.slot_row,
                row_prob=routing.row_prob,
            )
        else:
            tokens, topk, experts, _, rows = routing.sizes
            handle = self._routing_in(routing.memory, tokens, topk, experts, rows)
        bytes_of = self._bytes_of(handle, routing, hidden, inner)
        return Routed(handle, bytes_of, inner, self, device_of(routing.held[0]))

    def _bytes_of(self, handle: Any, routing: RoutingMetadata, hidden: int, inner: int) -> Any:
        # They follow from six numbers, and asking the module takes as long as a launch: a backward
        # finds those of its forward.
        numbers = routing.num_tokens, routing.topk, routing.num_experts, routing.num_rows
        key = (*numbers, hidden, inner)
        found = self._sizes.get(key)
        if found is None:
            found = self._named_sizes(self._ask_for_sizes(handle, hidden, inner))
            # Token counts differ from step to step, so this would grow for ever.
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            self._sizes[key] = found
        return found

    def activation_arguments(
        self, settings: EngineSettings, adapters: Adapters | None
    ) -> list[dict[str, Any]]:
        """The activation as `forward`, and as `dgated` takes it, and beside it the scales of adapters."""
        own = settings.activation, settings.activation_parameters
        names = "activation", "first", "second", "up_scale", "down_scale"
        scales = (0.0, 0.0) if adapters is None else adapters.scales
        return [
            dict(zip(names, (*launch_parameters(exported, *own), *scales), strict=True))
            for exported in self._activations
        ]

    def gradients(self, targets: GradientTargets) -> dict[str, Any]:
        """The arguments of `wgrad` that say where gradients are added or written."""
        # Where the memory is known, nobody looks for its destinations.
        return targets.once((self, targets.mode), lambda: self._gradients_into(targets))

    def _gradients_into(self, targets: GradientTargets) -> dict[str, Any]:
        up, down, how = targets.up, targets.down, (self._make_destination, targets.mode)
        return {
            "dw1": wgrad_destination(up, *how, parts=up.layout.split_half),
            "dw2": wgrad_destination(down, *how, parts=False),
        }

    def weights_of(self, matrices: Mapping[str, Any]) -> Any:
        """The handle of block-scaled weights and biases by their names in `EngineWeights`, and of
        the factors of adapters; the rest are None.
        """
        fields: dict[str, Any] = {name: matrices.get(name) for name in ("b1", "b2", *FACTORS)}
        for name in _WEIGHTS:
            matrix = matrices.get(name)
            fields[name] = None if matrix is None else matrix.bytes
            fields[f"{name}_scale"] = None if matrix is None else matrix.scale_inv
            wanted = Orientation.COLUMNS if name.endswith("_dgrad") else Orientation.ROWS
            # Where sizes coincide, no shape would show the other order.
            if matrix is not None and matrix.orientation is not wanted:
                raise ShapeError(
                    f"{name} is stored by {matrix.orientation.value}; needed: by {wanted.value}"
                )
        return self.weights(**fields)


# Not composed in every call: keywords that are no literals are compared letter by letter.
_TOKEN_NAMES = {
    "x": ("x", "x_codes", "x_scale"),
    "dout": ("dout", "dout_codes", "dout_scale"),
}


def token_arguments(name: str, tokens: Tensor | BlockScaledTensor | None) -> dict[str, Any]:
    """The arguments of a pass for tokens, or their gradients: values, or codes and scales."""
    of_values, of_codes, of_scale = _TOKEN_NAMES[name]
    if isinstance(tokens, BlockScaledTensor):
        return {of_values: None, of_codes: tokens.bytes, of_scale: tokens.scale_inv}
    return {of_values: tokens, of_codes: None, of_scale: None}


def z_arguments(z: KeptZ | None) -> dict[str, Any]:
    """The arguments of a pass for z: codes and scales, or bf16 rows, or none that is kept."""
    if isinstance(z, BlockScaledTensor):
        return {"z": z.bytes, "z_scale": z.scale_inv, "z_rows": None}
    return {"z": None, "z_scale": None, "z_rows": z}


def prepared_handle(
    passes: Passes,
    weights: EngineWeights,
    settings: EngineSettings,
    backward: bool = False,
    stream: int = 0,
) -> PreparedHandle:
    """The handle of prepared weights, kept beside the tensors it refers to, so that it lives as long
    as they do and no longer. backward: of which pass factors of adapters are to be in it.
    """
    both = weights.two_orders
    names = ("w1", "w2", "b1", "b2", *(("w1_dgrad", "w2_dgrad") if both else ()))
    matrices = {name: getattr(weights, name) for name in names}
    factors = factors_of(weights.adapters, passes, settings, backward, stream)
    handle = passes.weights_of({**matrices, **factors})
    sizes = weights.hidden_size, weights.intermediate_size
    up, dgated = passes.activation_arguments(settings, weights.adapters)
    own = weights.adapters, backward
    held = PreparedHandle(handle, *sizes, both, passes, settings, up, dgated, *own)
    object.__setattr__(weights, "native", held)
    return held


def factors_of(
    adapters: Adapters | None, passes: Passes, settings: EngineSettings, backward: bool, stream: int
) -> dict[str, Tensor]:
    """Those that a forward, or a backward, reads, by their names in the handle."""
    found = {}
    for side, pair in zip(("up", "down"), adapters or (None, None), strict=True):
        if pair is None:
            continue
        operands = FactorOperands(pair, torch.bfloat16, passes.kernels["prepare_factor"], stream)
        for name in "ab":
            if backward:
                found[f"{side}_{name}_t"] = operands.transposed(name)
            # A backward may compute z again.
            if not backward or (settings.recompute_z and side == "up"):
                found[f"{side}_{name}"] = operands.straight(name)
    return found


def _check_numbers(built: Mapping[Any, Any]) -> None:
    for name, value in (
        ("row_alignment", ROW_ALIGNMENT),
        ("scale_block", SCALE_BLOCK),
        ("gate_up_block", GATE_UP_BLOCK),
    ):
        words = f"the passes were built with {name} = {built[name]}; this package has {value}"
        expect(int(built[name]) == value, ConfigError, words)


@functools.lru_cache(maxsize=64)
def passes_on(
    device: str,
    activation: ActivationType,
    z: ZCode = ZCode.ADAPTIVE,
    bias: bool = False,
    low_rank: bool = False,
) -> Passes:
    """The compiled passes over the compiled kernels of a device, an activation, a form of z, and
    whether there are biases and low-rank adapters; errors as `CudaSource.load`.
    """
    arch = arch_of(device)
    sources = (
        routing_metadata_source(arch),
        aggregate_source(arch),
        quantize_source(arch),
        wgrad_operands_source(arch),
        *gemm_sources(arch, activation, z, bias, low_rank),
    )
    # In the order of `sources`.
    routing, aggregate, quantize, operands, gemms, dgated, wgrad = (
        source.load() for source in sources
    )
    kernels = {
        "quantize_rows": quantize.quantize_rows,
        "gather_gated_gemm": gemms.gather_gated_gemm,
        "grouped_gemm": gemms.grouped_gemm,
        "aggregate_rows": aggregate.aggregate_rows,
        "gather_dgated_gemm": dgated.gather_dgated_gemm,
        "sum_or_zero": routing.sum_or_zero,
        "gather_transpose_quantize": operands.gather_transpose_quantize,
        "gather_transpose_quantize_pair": operands.gather_transpose_quantize_pair,
        "gather_transpose_requantize": operands.gather_transpose_requantize,
        "grouped_wgrad": wgrad.grouped_wgrad,
        "wgrad_destination": wgrad.wgrad_destination,
    }
    of_biases = bias_gradients_source(arch).load() if bias else None
    for name in ("sum_dz", "sum_tokens"):
        kernels[name] = getattr(of_biases, name, None)
    of_adapters = low_rank_source(arch).load() if low_rank else None
    for name in _LOW_RANK.split():
        kernels[name] = getattr(of_adapters, name, None)
    activations = (gemms.activation_names(), dgated.activation_names())
    return Passes(passes_source(arch).load(), activations, kernels)
