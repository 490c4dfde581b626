"""A forward, and a backward to the tokens, of the engines whose passes are programs: what is launched,
and what is allocated and freed around it.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..interop import aligned, current_stream, empty, free, plain_ops
from ..observe import tap
from ..quant.format import BlockScaledTensor
from ..routing.metadata import RoutingMetadata
from .border import check_dout, check_forward
from .interface import Engine, EngineWeights
from .low_rank import Adapters, Narrow
from .settings import EngineSettings
from .targets import GradientTargets
from .tokens import PendingWgrad, Saved, Tokens

Tensor = torch.Tensor

# dz and y1s as wgrad reads them, each None where nobody will read it; and whether they are rows instead
# of transposed codes with their scales. A plain tuple, because every backward makes one and creating
# an object takes the host longer.
Operands = tuple[Tensor | None, Tensor | None, bool]
NO_OPERANDS: Operands = (None, None, False)


class Prepared:
    """What is bound of weights for calls with these settings (`EngineWeights.native`): the passes that
    read the weights, and the handle that they take; None until the first call.

    are_lent: the weights are the user's own memory.
    """

    def __init__(self, settings: EngineSettings, are_lent: bool = False) -> None:
        self.settings, self.are_lent = settings, are_lent
        self.bound: tuple[Any, Any] | None = None


class RoutedLayer(ABC):
    """The passes of one forward, or of one backward to the tokens, and what their arguments share.

    Holds handles of the routing and the weights, which the caller holds anyway, and no activation:
    what stage-wise memory frees between two passes is free.

    dtype, device: of out and dx; the dtype is `token_dtype` of the tokens.
    routed: the routing as passes take it.
    u, v: of adapters, in narrow_dtype, or in the dtype of the tokens where that is None. Passes fill
        u where z is computed, and v in dgated.
    biases: memory of db1 `[E, N1]` and db2 `[E, H]`, which dgated fills where it is there.
    db: `factor_gradients` of the factors in with_dgated, whose gradients dgated sums.
    parts_of_b: the kernel that says how much memory sums of second factors need.
    """

    narrow_dtype: torch.dtype | None = None
    with_dgated: str
    parts_of_b: str
    u = v = Narrow()
    biases: tuple[Tensor, Tensor] | None = None
    db: Mapping[str, Tensor | None] = dict.fromkeys(("d_up_b", "d_down_b", "parts"))

    def __init__(
        self,
        x: Any,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        backward: bool = False,
    ) -> None:
        if isinstance(x, BlockScaledTensor):
            anchor, self.dtype = x.codes, torch.bfloat16
        else:
            anchor, self.dtype = x, x.dtype
        # Asked once a layer: device and stream of a tensor cost the host as much as a launch.
        self._stream = current_stream(anchor)
        prepared, bound = weights.native, None
        if prepared is None or prepared.settings is not settings:
            prepared = weights.native = Prepared(settings)
        elif weights.adapters is None:  # which every call has its own of
            bound = prepared.bound
        if bound is None:
            bound = self._bind(anchor, weights, settings, backward)
            prepared.bound = bound if weights.adapters is None else prepared.bound
        self._passes, self._handle = bound
        self.routed = self._passes.routed(routing, weights.hidden_size, weights.intermediate_size)
        self.device = self.routed.device
        self._routing, self._weights, self._settings = routing, weights, settings

    @abstractmethod
    def _bind(
        self, anchor: Tensor, weights: EngineWeights, settings: EngineSettings, backward: bool
    ) -> tuple[Any, Any]:
        """The passes for tokens like `anchor` and these weights, and the handle of what is bound."""

    @abstractmethod
    def empty_z(self) -> Any:
        """Unwritten `[R, N1]`."""

    def empty_biases(self) -> tuple[Tensor, Tensor] | None:
        """Unwritten `biases`, where dgated sums them."""
        return None

    @abstractmethod
    def empty_operands(self, saved: Saved, z: Any) -> Operands:
        """Unwritten."""

    def empty_dx(self, x: Tokens) -> Tensor:
        """Unwritten `[T, H]`."""
        return empty(tuple(x.shape), self.dtype, self.device)  # type: ignore[no-any-return]

    def scratch(self, buffer: str, last: str) -> Tensor:
        """So much of a buffer that a part of it, and all before, have room."""
        return empty((self.routed.ends[buffer, last],), torch.uint8, self.device)  # type: ignore[no-any-return]

    def empty_narrow(self, adapters: Adapters) -> Tensor:
        """Memory of a `Narrow`, unwritten."""
        size = self._routing.num_rows, sum(adapters.widths)
        return empty(size, self.narrow_dtype or self.dtype, self.device)  # type: ignore[no-any-return]

    @abstractmethod
    def forward(self, x: Any, z: Any, out: Tensor | None) -> None:
        """Fills what there is of z `[R, N1]` and out `[T, H]`."""

    def restored_z(self, x: Tokens, saved: Saved) -> Any:
        """z as forward stored it, or computed again to the same bits."""
        # The same kernel on the same operands gives the same bits, so nothing depends on the mode.
        if saved.z is None:
            z = self.empty_z()
            self.forward(x, z, None)
            return z
        return saved.z

    @abstractmethod
    def goes_apart(self, saved: Saved) -> bool:
        """Whether memory is to be freed between `dgated` and `dgrad`."""

    @abstractmethod
    def dgated(
        self, dout: Any, z: Any, operands: Operands, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`(what dgrad reads dz from, dprobs [T, K])`. Fills the operands of wgrad.

        dx: filled at once, where nothing is to be freed before `dgrad`. That takes fewer allocations.
        """

    @abstractmethod
    def dgrad(self, dz: Tensor, x: Any) -> Tensor:
        """dx `[T, H]`, from the dz that `dgated` left."""

    @abstractmethod
    def sums_of_factors(self, x: Any, dout: Any, operands: Operands) -> tuple[Tensor | None, ...]:
        """`PendingWgrad.adapters`, of what `dgated` of this backward has filled."""

    def factor_gradients(self, names: str) -> dict[str, Tensor | None]:
        """Allocate `d_up_<name>` and `d_down_<name>` of these names, fp32 gradients in the strides of
        the factors, and `parts`, scratch for the largest sum: arguments of the passes.
        """
        adapters, routing, kernels = self._weights.adapters, self._routing, self._passes.kernels
        found: dict[str, Tensor | None] = {}
        size = 0
        for name in names:
            found |= {f"d_up_{name}": None, f"d_down_{name}": None}
            wide, parts_of = (2, "gradient_parts") if name == "a" else (1, self.parts_of_b)
            for side, pair in zip(("up", "down"), adapters or (None, None), strict=True):
                if pair is not None:
                    factor = getattr(pair, name)
                    found[f"d_{side}_{name}"] = torch.empty_like(factor, dtype=torch.float32)
                    sizes = routing.num_rows, routing.num_experts, factor.shape[wide], pair.width
                    size = max(size, int(kernels[parts_of](*sizes, factor.shape[3 - wide])))
        return {**found, "parts": empty((size,), torch.float32, self.device) if size else None}

    def sum_factors(self, **arguments: Any) -> tuple[Tensor | None, ...]:
        """The gradients of all factors, which the pass `adapters` of these arguments fills, or zeros
        where there is no row.
        """
        every = {**self.db, **arguments}
        found = tuple([every[name] for name in ("d_up_a", "d_up_b", "d_down_a", "d_down_b")])
        if self._routing.num_rows == 0:
            return tuple([None if each is None else each.zero_() for each in found])
        # Not the layer's stream: gradients that are put off may run on another one.
        stream = current_stream(self._routing.held[0])
        self._passes.adapters(routing=self.routed.routing, stream=stream, **arguments)
        return found


class RoutedEngine(Engine):
    """Forward and backward to the tokens of an engine whose passes are programs."""

    layer: Callable[..., RoutedLayer]

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Two GEMMs, a weighted gather-and-sum; `save=False` stores no z. Tokens that come quantised are
        read as they are.
        """
        check_forward(x, routing, weights, settings, self.record)
        with plain_ops():
            x = _aligned(x)
            layer = self.layer(x, routing, weights, settings)
            # The kernel writes z only where it is given memory for it.
            z = layer.empty_z() if save and not settings.recompute_z else None
            out, projected = empty(tuple(x.shape), layer.dtype, layer.device), None
            if weights.adapters is not None:
                projected = layer.empty_narrow(weights.adapters)
                layer.u = Narrow.within(projected, weights.adapters.widths)
            layer.forward(x, z, out)
            saved = Saved(settings, routing, x, z, projected=projected) if save else None
            return tap("out", out), saved

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """dgated with dprobs' sums and those of biases, dgrad, an unweighted gather-and-sum. A dout that
        comes quantised is read as it is.
        """
        dout = check_dout(dout, saved, self.record)
        settings, routing = saved.settings, saved.routing
        with plain_ops():
            assert saved.x is not None
            x = _aligned(saved.x)  # which may have been copied since forward
            layer = self.layer(x, routing, weights, settings, backward=True)
            # Paddle's `to` takes as long as five launches, also where there is nothing to cast.
            if not isinstance(dout, BlockScaledTensor) and dout.dtype != layer.dtype:
                dout = dout.to(layer.dtype)
            dout = _aligned(dout)
            if weights.adapters is not None:
                memory = saved.projected, layer.empty_narrow(weights.adapters)
                layer.u, layer.v = (Narrow.within(m, weights.adapters.widths) for m in memory)
                layer.db = layer.factor_gradients(layer.with_dgated)
            z = layer.restored_z(x, saved)
            if saved.wants_biases:
                layer.biases = layer.empty_biases()
            apart = layer.goes_apart(saved)
            dx = None if apart else layer.empty_dx(x)
            operands = layer.empty_operands(saved, z)
            dz, dprobs = layer.dgated(dout, z, operands, dx)
            pending = PendingWgrad(
                settings, routing, x, dout, None, None, weights.layout.split_half
            )
            if weights.adapters is not None:
                pending.adapters = partial(layer.sums_of_factors, x, dout, operands)
            # Only now: where `dgated` finds no memory, the backward may be repeated.
            if saved.donated and saved.z is not None:
                if operands[0] is not z:
                    _free(z)
                # Gradients of factors read dz after those of the weights.
                pending.donated = operands[0] is z and pending.adapters is None
            if settings.frees_stagewise or saved.donated:
                saved.z = None
            del z
            if pending.adapters is not None and apart and not saved.wants_weights:
                # Computed now, because their operands are then freed before the rows of dx come.
                found = pending.adapters()
                pending.adapters, operands, layer.db = (lambda: found), NO_OPERANDS, {}
            dx = tap("dx", layer.dgrad(dz, x) if dx is None else dx)
            pending.dz, pending.y1s, _ = operands
            pending.native, pending.biases = layer.routed, layer.biases
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending


def add_products(
    pending: PendingWgrad,
    targets: GradientTargets,
    find: Callable[[], tuple[Any, Any]],
    launch: Callable[[Any, Any], None],
    one_by_one: bool,
    biases: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add or write both weight gradients, and the sums `biases`, whose order is that of dz.

    find: the destinations of dw1 and dw2, None for one that nobody wants. launch: the products into
    those that there are. one_by_one: the operands of one are freed before the next begins.
    """
    (dw1, dw2), is_late = find(), targets.make_down is not None
    targets.adding = True
    if biases is not None:
        targets.add_biases(*biases, split_half=pending.split_half)
    if is_late:
        # dz is larger than y1s, and its memory is free for dw2.
        launch(dw1, None)
        if pending.donated:
            free(pending.dz)
        pending.x = pending.dz = dw1 = None
        targets.take_down()
        _, dw2 = find()
    elif one_by_one:
        launch(None, dw2)
        pending.dout = pending.y1s = dw2 = None
    launch(dw1, dw2)
    targets.adding = False


def _free(z: Tensor | BlockScaledTensor) -> None:
    """Give the memory of a donated z back, whoever holds the tensors: autograd does, to the end of the
    backward. A part of a larger buffer stays: a hook of saved tensors may have put it there.
    """
    for part in (z.bytes, z.scale_inv) if isinstance(z, BlockScaledTensor) else (z,):
        free(part)


def _aligned(x: Tokens) -> Tokens:
    if not isinstance(x, BlockScaledTensor):
        return aligned(x, detached=False)  # type: ignore[no-any-return]
    codes, scale_inv = aligned(x.codes), aligned(x.scale_inv)
    if codes is x.codes and scale_inv is x.scale_inv:
        return x
    return replace(x, codes=codes, scale_inv=scale_inv)
