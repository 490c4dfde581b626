"""The passes of the Hopper engine on one device: the programs of `hopper_program` over its kernels, and
what their arguments share.
"""

from __future__ import annotations

import functools
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
from ..kernels.host import program_source
from ..kernels.sm90 import gemm_sources, launch_parameters
from ..quant.format import BlockScaledTensor, Orientation
from ..routing.backends import arch_of
from ..routing.metadata import ROW_ALIGNMENT, RoutingMetadata
from .factor_operands import FactorOperands
from .gradient_places import wgrad_destination
from .hopper_program import (
    BINDS,
    FACTORS,
    GATES,
    KERNELS,
    PASSES,
    RECIPE,
    ROUTING,
    VOCABULARY,
    WEIGHTS,
)
from .interface import EngineSettings, EngineWeights
from .low_rank import Adapters
from .program import Program, Programs
from .targets import GradientTargets

Tensor = torch.Tensor
KeptZ = BlockScaledTensor | Tensor  # 8-bit codes, or bf16
# `Passes` refuses kernels that were built for others.
SCALE_BLOCK, GATE_UP_BLOCK = RECIPE.w2.rows, RECIPE.w1.rows
Z_BLOCK = RECIPE.z
MAX_SIZES = 1024  # of scratch, kept for one device: a step has as many as batches in flight
_NO_TENSORS = [None] * len(ROUTING)
# What passes call themselves.
_BESIDE = "wgrad_destination", "gradient_parts", "parts_of_both", "prepare_factor"


class PreparedHandle(NamedTuple):
    """The native handle of prepared weights, with their H and I, and the passes that take it under
    these settings. has_dgrad: the handle refers to backward's order too, which `iso_weight` does
    not keep.
    """

    handle: Any
    hidden: int
    inner: int
    has_dgrad: bool
    passes: Passes
    settings: EngineSettings
    adapters: Adapters | None = None
    of_backward: bool = False


class Routed(NamedTuple):
    """A routing as passes take it, how many bytes of each buffer of a layer its parts take up to their
    ends (`Programs.part_ends`), the passes that take them, and the device.
    """

    routing: tuple[Any, ...]
    ends: Mapping[tuple[str, str], int]
    passes: Passes
    device: Any


class Passes:
    """The passes over one set of kernels; each takes its arguments by keyword. bind: makes the handle
    of weights of all that is bound.
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
        self.kernels, of = kernels, Programs(native, VOCABULARY, kernels)
        self.bind, self._part_ends = of.bind, of.part_ends("TKERHI")
        calls = {n: Program(of, n, *told, binds=n in BINDS).call for n, told in PASSES.items()}
        self.forward, self.dgated, self.dgrad = (calls[n] for n in ("forward", "dgated", "dgrad"))
        self.wgrad, self.dw1, self.dw2 = (calls[name] for name in ("wgrad", "dw1", "dw2"))
        self.adapters = calls["adapters"]
        self._make_destination: Any = kernels.get("wgrad_destination")
        self._ends: dict[tuple[int, ...], dict[tuple[str, str], int]] = {}

    def routed(self, routing: RoutingMetadata, hidden: int, inner: int) -> Routed:
        """What the passes of one forward, or of one backward, need to know of `routing`."""
        memory = routing.memory
        held = _NO_TENSORS if memory is not None else [getattr(routing, name) for name in ROUTING]
        tokens, topk, experts, _, rows = routing.sizes
        # Asking native code takes as long as a launch: a backward finds the sizes of its forward.
        key = tokens, topk, experts, rows, hidden, inner
        ends = self._ends.get(key)
        if ends is None:
            # Token counts differ from step to step, so this would grow for ever.
            if len(self._ends) >= MAX_SIZES:
                self._ends.clear()
            ends = self._ends[key] = self._part_ends(*key)
        given = memory, *held, tokens, topk, experts, rows, inner
        return Routed(given, ends, self, device_of(routing.held[0]))

    def numbers(self, settings: EngineSettings, adapters: Adapters | None) -> dict[str, Any]:
        """What is bound beside weights: which activation the GEMMs compute, the scales of adapters, and
        how many multiprocessors the GEMMs may take.
        """
        own = settings.activation, settings.activation_parameters
        scales = (0.0, 0.0) if adapters is None else adapters.scales
        found = dict(zip(("up_scale", "down_scale"), scales, strict=True))
        found["multiprocessors"] = settings.gemm_num_sms
        for names, exported in zip(GATES.values(), self._activations, strict=True):
            found |= zip(names, launch_parameters(exported, *own), strict=True)
        return found

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

    def weights_of(self, matrices: Mapping[str, Any], numbers: Mapping[str, Any]) -> Any:
        """The handle of block-scaled weights and biases by their names in `EngineWeights`, of the
        factors of adapters, and of `numbers`; what is missing is None. It owns references to its
        tensors.
        """
        fields: dict[str, Any] = {name: matrices.get(name) for name in ("b1", "b2", *FACTORS)}
        for name in WEIGHTS:
            matrix = matrices.get(name)
            fields[name] = None if matrix is None else matrix.bytes
            fields[f"{name}_scale"] = None if matrix is None else matrix.scale_inv
            wanted = Orientation.COLUMNS if name.endswith("_dgrad") else Orientation.ROWS
            # Where sizes coincide, no shape would show the other order.
            if matrix is not None and matrix.orientation is not wanted:
                raise ShapeError(
                    f"{name} is stored by {matrix.orientation.value}; needed: by {wanted.value}"
                )
        return self.bind(**fields, **numbers)


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
    numbers = passes.numbers(settings, weights.adapters)
    handle = passes.weights_of({**matrices, **factors}, numbers)
    sizes = weights.hidden_size, weights.intermediate_size
    own = weights.adapters, backward
    held = PreparedHandle(handle, *sizes, both, passes, settings, *own)
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
    up, dgated, wgrad = gemm_sources(arch, activation, z, bias, low_rank)
    always = routing_metadata_source, aggregate_source, quantize_source, wgrad_operands_source
    others = [bias_gradients_source] * bias + [low_rank_source] * low_rank
    modules = [source.load() for source in (up, dgated, wgrad)]
    modules += [source(arch).load() for source in (*always, *others)]
    # Every kernel is exported by one module; those of biases and adapters by none, where there is no
    # need of them.
    kernels = {
        name: next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        for name in (*KERNELS, *_BESIDE)
    }
    activations = modules[0].activation_names(), modules[1].activation_names()
    return Passes(program_source(arch).load(), activations, kernels)
