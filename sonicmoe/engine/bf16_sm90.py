"""The products of the BF16 engine on Hopper, on kernels of our own. They read weights and leave
gradients where the caller has them: transposed or not, gate and up in halves or in turns.

z and dz have their columns in the order of w1's rows, so that every product but `up` and `dgated`
is a plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..enums import ActivationType, is_glu
from ..errors import ConfigError
from ..interop import current_stream, device_name, device_of, dtype_name, empty, free
from ..kernels import routing_metadata_source
from ..kernels.cuda_wgrad import expert_rows_module
from ..kernels.sm90 import bf16_sources, gathers_first, launch_parameters
from ..layouts import GateUp, WeightLayout
from ..observe import staged, tap
from ..routing.backends import arch_of
from ..routing.calls import Bind, RoutedCall
from ..routing.combine import sum_to_slots
from ..routing.metadata import RoutingMetadata
from .bf16_adapters import NOTHING, RowsOfAdapters, narrow_kernels
from .expert_matrices import ExpertMatrices
from .footprint import MAX_KNOWN
from .gradient_places import GradientPlaces, wgrad_destination
from .interface import EngineWeights
from .products import Products, empty_rows, plain_operand, shown_in_turns, write_zeros
from .settings import EngineSettings
from .targets import GradientTargets
from .tokens import PendingWgrad, plain_tokens

Tensor = torch.Tensor
_TILE_COLUMNS = 256  # of dy1, whose sums of a row are one partial sum
# Addresses and strides that the copy engine takes are multiples of 16 bytes, or 8 elements.
_BYTES, _ITEMS = 16, 8


class Kernels(NamedTuple):
    """The functions of the passes to the tokens, each of which is told the routing first. matrices:
    makes of addresses, rows and columns of `ExpertMatrices` what they take, once; None where
    weights are stacked. gate: the parameters of the activation, as `up` and `dgated` take them.
    """

    up: RoutedCall
    grouped_gemm: RoutedCall
    dgated: RoutedCall
    gather_rows: RoutedCall
    matrices: Callable[[tuple[int, ...], int, int], Any] | None
    gate: tuple[float, float]

    @classmethod
    def of(
        cls, gemm: Any, dgated: Any, rows: Any, matrices: Any, gate: Any, bind: Bind | None = None
    ) -> Kernels:
        """The functions of three loaded modules; bind: as of `RoutedCall`."""
        return cls(
            RoutedCall(gemm.up, 8, "row_token padded_offsets", bind),
            RoutedCall(gemm.grouped_gemm, 7, "padded_offsets", bind),
            RoutedCall(dgated.dgated, 7, "row_prob row_token padded_offsets", bind),
            RoutedCall(rows.gather_rows, 1, "row_token", bind),
            matrices,
            gate,
        )


class Wgrad:
    """The function of weight gradients, which is told the routing first, and where these go."""

    def __init__(self, module: Any, bind: Bind | None = None) -> None:
        """Take the functions of a loaded module; bind: as of `RoutedCall`."""
        fields = "row_token padded_offsets expert_counts"
        self.wgrad = RoutedCall(module.wgrad, 3, fields, bind)
        self.make_destination = module.wgrad_destination


@functools.lru_cache(maxsize=64)
def kernels_on(
    device: str,
    activation: Any,
    parameters: Any,
    dtype: str,
    rows_first: bool,
    separate: bool,
    low_rank: bool,
) -> Kernels:
    """Loaded, or compiled, at the first call; errors as `CudaSource.load`."""
    arch = arch_of(device)
    sources = bf16_sources(arch, activation, dtype, rows_first, separate, low_rank)
    gemm, dgated = (sources[name].load() for name in ("bf16_gemm", "bf16_dgated"))
    # Of addresses that stay, as parameters' do, maps are encoded once.
    kept = functools.lru_cache(maxsize=MAX_KNOWN)
    matrices = kept(gemm.expert_matrices) if separate else None
    # Both modules name the parameters in one order, that of the activation's struct.
    _, *gate = launch_parameters(gemm.activation_names(), activation, parameters)
    modules, bind = (gemm, dgated, expert_rows_module(arch)), _bind_on(arch)
    return Kernels.of(*modules, matrices, (gate[0], gate[1]), bind)


def _bind_on(arch: str) -> Bind:
    return routing_metadata_source(arch).load().with_routing  # type: ignore[no-any-return]


class Prepared:
    """The kernels that launches over one kind of weights share (`EngineWeights.native`), without
    adapters and with them. Each set is loaded when it is first asked for.
    are_lent: the weights are the user's own memory.
    """

    def __init__(self, settings: EngineSettings, are_lent: bool = False) -> None:
        self.settings, self.are_lent = settings, are_lent
        self.kernels: list[Kernels | None] = [None, None]


def kernels_for(tokens: Tensor, settings: EngineSettings, weights: EngineWeights) -> Kernels:
    """The kernels that read these tokens and weights."""
    prepared = weights.native
    if prepared is None or prepared.settings is not settings:
        prepared = Prepared(settings)
        object.__setattr__(weights, "native", prepared)
    adapted = weights.adapters is not None
    kernels: Kernels | None = prepared.kernels[adapted]
    if kernels is None:
        own = settings.activation, settings.activation_parameters
        form = gathers_first(weights.intermediate_size), isinstance(weights.w1, ExpertMatrices)
        of_call = device_name(tokens), *own, dtype_name(tokens.dtype)
        kernels = prepared.kernels[adapted] = kernels_on(*of_call, *form, adapted)
    return kernels


@functools.lru_cache(maxsize=16)
def wgrad_on(device: str, dtype: str) -> Wgrad:
    """The kernel of weight gradients of every activation, loaded or compiled at the first call."""
    sources = bf16_sources(arch_of(device), ActivationType.SWIGLU, dtype)
    module = sources["bf16_wgrad"].load()
    return Wgrad(module, _bind_on(arch_of(device)))


class HopperProducts(Products):
    """Every argument is named in the `.cu` files of `kernels/sm90`."""

    def __init__(
        self,
        routing: RoutingMetadata,
        weights: EngineWeights,
        kernels: Kernels,
        settings: EngineSettings,
        row_sums_of: Any,
        stream: int,
    ) -> None:
        """row_sums_of: sums partial sums and `<dout, b2>` of every row."""
        super().__init__(routing, weights)
        self._kernels, self._row_sums_of, self._stream = kernels, row_sums_of, stream
        self._narrow: RowsOfAdapters | None = None
        self._layout = weights.layout.transposed, weights.layout.split_half
        self._launch = settings.gemm_num_sms, stream

    def _operand(self, weight: Any) -> tuple[Any, Any]:
        """A weight as the kernels take it, and the tensor of its second half, if there are two."""
        if type(weight) is GateUp:
            return weight
        if not isinstance(weight, ExpertMatrices):
            return weight, None
        assert self._kernels.matrices is not None
        return self._kernels.matrices(weight.addresses, *weight.shape[1:]), None

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """Tokens as `up` and `dgated` take them."""
        if not gathers_first(self.weights.intermediate_size):
            return tokens
        rows = empty_rows(self.routing, self.weights.hidden_size, tokens)
        self._kernels.gather_rows(self.routing, tokens, rows, self._stream)
        return rows

    def adapt(self, projected: Tensor) -> None:
        """From here on with the adapters of the weights, u of which lie in `projected`."""
        adapters = self.weights.adapters
        assert adapters is not None
        given = adapters, self.routing, projected, self._layout[1]
        kernels = narrow_kernels(device_name(projected))
        self._narrow = RowsOfAdapters(*given, kernels, self._stream)

    def gradients(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """`PendingWgrad.adapters`, after a backward to x."""
        assert self._narrow is not None
        return self._narrow.gradients(x)

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor | None) -> None:
        kernels, weights = self._kernels, self.weights
        given = self._rows_of(x), *self._operand(weights.w1), *self._layout, weights.b1
        adapter = NOTHING if self._narrow is None else self._narrow.projected("up", x, True)
        kernels.up(self.routing, *given, *adapter, z, y1, *kernels.gate, *self._launch)

    def up_again(self, x: Tensor, z: Tensor) -> None:
        self.up(x, z, None)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        weights = self.weights
        given = y1, *self._operand(weights.w2), self._layout[0], weights.b2
        adapter = NOTHING if self._narrow is None else self._narrow.projected("down", y1, False)
        self._kernels.grouped_gemm(self.routing, *given, *adapter, y2, *self._launch)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        # The same matrices, contracted over their rows.
        given = dz, *self._operand(self.weights.w1_dgrad), not self._layout[0], None
        adapter = NOTHING if self._narrow is None else self._narrow.returned("up", dz, False)
        self._kernels.grouped_gemm(self.routing, *given, *adapter, dx_rows, *self._launch)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[tiles, R]`."""
        kernels, weights, routing = self._kernels, self.weights, self.routing
        tiles = -(-weights.intermediate_size // _TILE_COLUMNS)
        partials = empty((tiles, routing.num_rows), torch.float32, device_of(dout))
        given = self._rows_of(dout), self._operand(weights.w2_dgrad)[0], *self._layout
        outputs, adapter = (dz, y1s, partials), NOTHING
        if self._narrow is not None:
            adapter = self._narrow.returned("down", dout, True)
            self._narrow.keep(dout, y1s)
        kernels.dgated(routing, *given, *adapter, z, *outputs, *kernels.gate, *self._launch)
        return partials

    def dprobs(self, partials: Tensor, dout: Tensor) -> Tensor:
        if self.weights.b2 is None:
            return sum_to_slots(partials, self.routing)
        return super().dprobs(partials, dout)

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        of_rows = partials.transpose(0, 1).contiguous()
        sums: Tensor = self._row_sums_of(of_rows, dout, self.weights.b2)
        return sums

    def shown(self, name: str, operand: Tensor) -> Tensor:
        if name in ("z", "dz") and self._layout[1]:
            return shown_in_turns(name, operand)
        return tap(name, operand)


def add_gradients(
    pending: PendingWgrad, targets: GradientTargets, biases: tuple[Tensor, Tensor] | None
) -> None:
    """`backward_dw` of operands that are there. biases: `Engine.bias_gradients`, where the targets
    want these.
    """
    if pending.routing.num_rows == 0:
        write_zeros(targets)
        return
    dz = plain_operand(pending.dz)
    kernels = wgrad_on(device_name(dz), dtype_name(dz.dtype))
    del dz  # its memory may be wanted before the end
    order = pending.split_half, is_glu(pending.settings.activation)
    into_dw1, into_dw2 = _destinations(kernels, targets, *order)
    is_late = targets.make_down is not None
    targets.adding = True
    if biases is not None:
        targets.add_biases(*biases, split_half=pending.split_half)
    if is_late:
        # dz is larger than y1s, and its memory is free for dw2.
        _add("dw1", kernels, pending, into_dw1)
        if pending.donated:
            free(plain_operand(pending.dz))
        pending.x = pending.dz = None
        targets.take_down()
        _, into_dw2 = _destinations(kernels, targets, *order)
    _add("dw2", kernels, pending, into_dw2)
    if pending.settings.frees_stagewise:
        pending.dout = pending.y1s = None
    if not is_late:
        _add("dw1", kernels, pending, into_dw1)
    targets.adding = False


def _add(gradient: str, kernels: Wgrad, pending: PendingWgrad, destination: Any | None) -> None:
    if destination is None:
        return
    is_down = gradient == "dw2"
    tokens, rows = (pending.dout, pending.y1s) if is_down else (pending.x, pending.dz)
    operands = plain_tokens(tokens), plain_operand(rows), is_down
    launch = pending.settings.gemm_num_sms, current_stream(rows)
    staged(gradient, kernels.wgrad, pending.routing, *operands, destination, *launch)


def _destinations(
    kernels: Wgrad, targets: GradientTargets, split_half: bool, gated: bool
) -> tuple[Any | None, Any | None]:
    """The destinations of dw1 and dw2; None where nobody wants it. split_half: whether dz's columns are
    in halves. gated: whether these are gates and up values.
    """
    up, down, how = targets.up, targets.down, (kernels.make_destination, targets.mode)

    def find() -> tuple[Any | None, Any | None]:
        problem = _order_problem(targets, split_half, gated)
        if problem is not None:
            raise ConfigError(f"the BF16 GEMMs cannot leave gradients there: {problem}")
        # Gates and up values of dz's halves, where the gradient has them in turns, are two parts.
        parts = up.is_apart or (split_half and not up.layout.split_half)
        dw1 = wgrad_destination(up, *how, parts=parts) if targets.wants("dw1") else None
        dw2 = wgrad_destination(down, *how, parts=False) if targets.wants("dw2") else None
        return dw1, dw2

    return targets.once((kernels, targets.mode, split_half, gated), find)


def problem_of(targets: GradientTargets, layout: WeightLayout, gated: bool) -> str | None:
    """Why the GEMMs cannot leave gradients there where weights lie so, or None."""
    return targets.copy_engine_problem() or _order_problem(targets, layout.split_half, gated)


def _order_problem(targets: GradientTargets, split_half: bool, gated: bool) -> str | None:
    """Why dz whose columns lie so gives no gradients in the order of these."""
    up = targets.up
    if not gated or up.layout.split_half == split_half or up.first is None:
        return None
    if up.layout.split_half:
        return (
            "up-projection gradients hold all gates before all up values, and the weights have the "
            "two in turns"
        )
    # Gates and up values then alternate along the contiguous axis, as single elements.
    if all(_is_along_hidden(up, tensor) for tensor in up.tensors if tensor is not None):
        return None
    return (
        "up-projection gradients are contiguous along gate and up in turns, and the weights hold "
        "all gates before all up values"
    )


def _is_along_hidden(places: GradientPlaces, tensor: Tensor) -> bool:
    hidden = -2 if places.layout.transposed else -1
    return int(tensor.stride()[hidden]) == 1
