"""The BF16 engine for Hopper and Blackwell. Every product is a grouped GEMM with activation and its
gradient fused, and with the gather of tokens but for wide experts on Hopper: there of our own
(`bf16_sm90`), elsewhere of quack-kernels (`blackwell`). `products` has the passes.
"""

from __future__ import annotations

import torch

from ..architectures import SM90
from ..enums import is_glu
from ..interop import device_name, is_cuda, plain_ops
from ..layouts import NATIVE, StackedWeights, WeightLayout
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from . import bf16_sm90
from .bf16_weights import are_lent, kind_of, recognised, remember, weights_in_place
from .blackwell import bf16_gradients, quack_products
from .expert_matrices import tensors_of
from .expert_rows import ExpertRows, launch_scope
from .gpu import gpu_of
from .interface import EngineWeights
from .plain_engine import PlainEngine
from .products import plain_operand
from .routed_layer import Prepared, RoutedEngine
from .settings import EngineSettings
from .targets import GradientTargets
from .tokens import PendingWgrad, Saved, Tokens, plain_tokens

Tensor = torch.Tensor


class Bf16Engine(RoutedEngine, PlainEngine):
    """See the module docstring; `capabilities.BF16` says what it takes."""

    name = "bf16"
    layer = bf16_sm90.Bf16Layer  # on Hopper
    frees_dw1_first = True  # on Hopper, where it writes fresh gradients
    # Elsewhere.
    _products = staticmethod(quack_products.products)
    _wgrads = staticmethod(quack_products.wgrads)

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        written: bool = True,
    ) -> EngineWeights:
        """Prepare weights as every engine; on Hopper they stay where they lie."""
        if not (is_cuda(source.anchor) and _is_hopper(device_name(source.anchor))):
            return super().refresh(source, settings, previous, written)
        source = self._computed_in_bfloat16(source)
        with plain_ops():
            weights = weights_in_place(source, settings.activation)
        self._check_kinds(weights, settings)
        weights.native = Prepared(settings, are_lent(weights, source))
        return weights

    def keep(self, previous: EngineWeights, written: bool = False) -> bool:
        """On Hopper there is nothing to make of weights that are read where they lie."""
        prepared = previous.native
        return not written or (prepared is not None and prepared.are_lent and previous.b1 is None)

    def read_stacked(
        self,
        weights: StackedWeights,
        layout: WeightLayout,
        dtype: torch.dtype | None,
        settings: EngineSettings,
    ) -> EngineWeights:
        """Prepare stacked weights; on Hopper a known kind of them is asked for addresses alone."""
        kind = kind_of(weights, layout, dtype, settings)
        found = recognised(kind, weights)
        if found is None:
            found = super().read_stacked(weights, layout, dtype, settings)
            if found.native is not None and found.native.are_lent:
                remember(kind, settings, found)
        return found

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """By programs on Hopper, else one product after the other."""
        way = RoutedEngine if _are_on_hopper(weights) else PlainEngine
        return way.forward(self, x, routing, weights, settings, save=save)

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        way = RoutedEngine if _are_on_hopper(weights) else PlainEngine
        return way.backward_dx(self, dout, saved, weights)

    def _sum_biases(self, pending: PendingWgrad, db1: Tensor, db2: Tensor) -> None:
        dout, routing = plain_tokens(pending.dout), pending.routing
        with launch_scope(dout):
            rows = ExpertRows.of(routing)
            rows.add_columns(dout, db2, weight=routing.row_prob)
            rows.add_columns(plain_operand(pending.dz), db1, weight=None)

    def _add(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        if not _is_hopper(device_name(pending.dz)):
            super()._add(pending, targets)
            return
        biases = self.bias_gradients(pending) if targets.has_biases else None
        bf16_sm90.add_gradients(pending, targets, biases)

    def writes_gradients(self, settings: EngineSettings, device: str) -> bool:
        """On Hopper; elsewhere its GEMMs only add."""
        return _is_hopper(device)

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        if not (targets.wants("dw1") or targets.wants("dw2")):
            return None
        if _is_hopper(device_name(targets.anchor)):
            return bf16_sm90.problem_of(targets, layout, is_glu(settings.activation))
        return bf16_gradients.problem_of(targets)


def _is_hopper(device: str) -> bool:
    """Whether the GEMMs on this device, by name, are our own."""
    return device != "cpu" and gpu_of(device).arch == SM90.name


def _are_on_hopper(weights: EngineWeights) -> bool:
    # Only the Hopper path sets `native`: where it is set, the device need not be asked.
    return weights.native is not None or _is_hopper(device_name(tensors_of(weights.w1)[0]))
