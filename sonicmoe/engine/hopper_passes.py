"""The passes of the Hopper engine on one device: the programs of `hopper_program` over its kernels, and
what their arguments share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..enums import ActivationType, ZCode
from ..errors import ShapeError
from ..kernels.sm90 import engine_sources, launch_parameters
from ..quant.format import BlockScaledTensor, Orientation
from ..routing.backends import arch_of
from .gradient_places import wgrad_destination
from .hopper_program import BINDS, GATES, KERNELS, PASSES, RECIPE, VOCABULARY, WEIGHTS
from .interface import EngineSettings
from .low_rank import Adapters
from .routed_passes import FACTORS, OF_ADAPTERS, RoutedPasses, exported_by
from .targets import GradientTargets

Tensor = torch.Tensor
KeptZ = BlockScaledTensor | Tensor  # 8-bit codes, or bf16
Z_BLOCK = RECIPE.z


class Passes(RoutedPasses):
    """The passes over one set of kernels."""

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
        super().__init__(native, kernels, VOCABULARY, PASSES, BINDS)
        self._activations = [tuple(map(str, exported)) for exported in activations]
        self._make_destination: Any = kernels.get("wgrad_destination")

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

    def gradients(self, targets: GradientTargets) -> tuple[Any, Any]:
        """Where dw1 and dw2 are added or written, as `wgrad` takes it; None for one that nobody wants."""
        up, down, how = targets.up, targets.down, (self._make_destination, targets.mode)

        def find() -> tuple[Any, Any]:
            dw1 = wgrad_destination(up, *how, parts=up.layout.split_half)
            dw2 = wgrad_destination(down, *how, parts=False)
            return dw1 if targets.wants("dw1") else None, dw2 if targets.wants("dw2") else None

        # Where the memory is known, nobody looks for its destinations.
        return targets.once((self, targets.mode), find)

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
    sources = engine_sources(arch_of(device), activation, z, bias, low_rank)
    # The GEMMs come first, and what replays programs last.
    *modules, native = [source.load() for source in sources]
    kernels = exported_by(modules, (*KERNELS, *OF_ADAPTERS, "wgrad_destination"))
    activations = modules[0].activation_names(), modules[1].activation_names()
    return Passes(native, activations, kernels)
