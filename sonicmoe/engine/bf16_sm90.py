"""The products of the BF16 engine on Hopper, on kernels of our own. They read weights and leave
gradients where the caller has them: transposed or not, gate and up in halves or in turns.

z and dz have their columns in the order of w1's rows, so that every product but `up` and `dgated`
is a plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..enums import ActivationType, is_glu
from ..errors import ConfigError
from ..interop import aligned, current_stream, data_ptr, device_name, device_of, dtype_name, empty
from ..kernels.quack_gemm import expert_rows_module
from ..kernels.sm90 import bf16_sources, gathers_first, launch_parameters
from ..layouts import NATIVE, StackedMatrices, WeightLayout, WeightSource, stack
from ..observe import stage, tap
from ..routing.backends import arch_of
from ..routing.combine import sum_to_slots
from .border import check_weights
from .expert_matrices import ExpertMatrices, may_stay_apart
from .gradient_memory import Place, WeightTarget
from .interface import EngineWeights
from .products import Products, empty_rows, plain_operand, shown_in_turns, write_zeros
from .settings import EngineSettings
from .targets import FreshTargets, GradientTargets, NativeBuffer, ParameterTargets
from .tokens import PendingWgrad, plain_tokens
from .wgrad_destinations import ADDED, MAX_DESTINATIONS, WRITTEN, Destinations

Tensor = torch.Tensor
_TILE_COLUMNS = 256  # of dy1, whose sums of a row are one partial sum
# Addresses and strides that the copy engine takes are multiples of 16 bytes, or 8 elements.
_BYTES, _ITEMS = 16, 8


class Kernels(NamedTuple):
    """The loaded modules of the passes to the tokens. matrices: makes of addresses, rows and columns of
    `ExpertMatrices` what the kernels take, once; None where weights are stacked. gate: the parameters
    of the activation, as `up` and `dgated` take them.
    """

    gemm: Any
    dgated: Any
    rows: Any
    matrices: Callable[[tuple[int, ...], int, int], Any] | None
    gate: tuple[float, float]


class Wgrad(NamedTuple):
    """The loaded module of weight gradients, and where these go."""

    module: Any
    destinations: Destinations


@functools.lru_cache(maxsize=64)
def kernels_on(
    device: str, activation: Any, parameters: Any, dtype: str, rows_first: bool, separate: bool
) -> Kernels:
    """Loaded, or compiled, at the first call; errors as `CudaSource.load`."""
    arch = arch_of(device)
    sources = bf16_sources(arch, activation, dtype, rows_first, separate)
    gemm, dgated = (sources[name].load() for name in ("bf16_gemm", "bf16_dgated"))
    # Of addresses that stay, as parameters' do, maps are encoded once.
    kept = functools.lru_cache(maxsize=MAX_DESTINATIONS)
    matrices = kept(gemm.expert_matrices) if separate else None
    # Both modules name the parameters in one order, that of the activation's struct.
    _, *gate = launch_parameters(gemm.activation_names(), activation, parameters)
    return Kernels(gemm, dgated, expert_rows_module(arch), matrices, (gate[0], gate[1]))


def kernels_for(tokens: Tensor, settings: EngineSettings, weights: EngineWeights) -> Kernels:
    """Those of these tokens and weights."""
    own = settings.activation, settings.activation_parameters
    form = gathers_first(weights.intermediate_size), isinstance(weights.w1, ExpertMatrices)
    return kernels_on(device_name(tokens), *own, dtype_name(tokens.dtype), *form)


@functools.lru_cache(maxsize=16)
def wgrad_on(device: str, dtype: str) -> Wgrad:
    """As `kernels_on`; of every activation."""
    sources = bf16_sources(arch_of(device), ActivationType.SWIGLU, dtype)
    module = sources["bf16_wgrad"].load()
    return Wgrad(module, Destinations(module.wgrad_destination))


def weights_in_place(source: WeightSource, activation: ActivationType) -> EngineWeights:
    """The user's weights where they lie. Three kinds are copied: weights of another dtype than the
    computation's, those that the copy engine cannot read, and more than `MOST` experts with tensors
    of their own. ShapeError where sizes do not fit together.
    """
    sides = source.up, source.down
    w1, w2 = (
        map(ExpertMatrices, sides)
        if _stay_apart(source)
        else (_stacked(side, source.compute_dtype) for side in sides)
    )
    b1, b2 = (
        None if bias is None else aligned(bias.to(torch.float32)) for bias in (source.b1, source.b2)
    )
    shapes = tuple([None if t is None else tuple(t.shape) for t in (w1, w2, b1, b2)])
    _check_shapes(shapes, source.layout.transposed, activation)
    return EngineWeights(w1, w2, w1, w2, b1, b2, layout=source.layout)


class _Shaped(NamedTuple):
    """All that `check_weights` looks at."""

    shape: tuple[int, ...]


# Every forward and backward asks. Of shapes that fit, the answer is kept.
@functools.lru_cache(maxsize=256)
def _check_shapes(
    shapes: tuple[tuple[int, ...] | None, ...], transposed: bool, activation: ActivationType
) -> None:
    """Refuse w1, w2, b1 and b2 of shapes that do not fit together. The kernels would take a bias of
    another shape that has as many elements.
    """
    w1, w2, *biases = shapes
    assert w1 is not None and w2 is not None
    native = [(*s[:-2], s[-1], s[-2]) if transposed else s for s in (w1, w2)]
    given: list[Any] = [None if s is None else _Shaped(s) for s in (*native, *biases)]
    up, down, b1, b2 = given
    check_weights(up, down, b1, b2, activation)


def _stay_apart(source: WeightSource) -> bool:
    """Whether these are a tensor of each expert that the kernels can read."""
    if isinstance(source.up, StackedMatrices) or isinstance(source.down, StackedMatrices):
        return False
    dtype, wanted = source.anchor.dtype, source.compute_dtype
    fits = may_stay_apart(len(source.up), dtype) and wanted in (None, dtype)
    inner = int(source.up[0].shape[-1]), int(source.down[0].shape[-1])
    aligned_rows = all(size % _ITEMS == 0 for size in inner)
    return fits and aligned_rows and not any(at % _BYTES for at in source.pointers)


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    weight = matrices.stacked if isinstance(matrices, StackedMatrices) else stack(list(matrices))
    if dtype is not None and weight.dtype != dtype:
        weight = weight.to(dtype)
    *strides, last = (int(stride) for stride in weight.stride())
    # An expanded weight has a stride of 0, which the driver refuses.
    fits = last == 1 and all([stride > 0 and stride % _ITEMS == 0 for stride in strides])
    if fits and data_ptr(weight) % _BYTES == 0:
        return weight
    return aligned(weight)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class HopperProducts(Products):
    """Every argument is named in the `.cu` files of `kernels/sm90`.

    row_sums_of: sums partial sums and `<dout, b2>` of every row.
    """

    kernels: Kernels
    settings: EngineSettings
    row_sums_of: Any
    stream: int

    @property
    def _halves(self) -> bool:
        return self.weights.layout.split_half

    @property
    def _launch(self) -> tuple[int, int]:
        return self.settings.gemm_num_sms, self.stream

    def _operand(self, weight: Any) -> Any:
        """A weight as the kernels take it."""
        if not isinstance(weight, ExpertMatrices):
            return weight
        assert self.kernels.matrices is not None
        return self.kernels.matrices(weight.addresses, *weight.shape[1:])

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """Tokens as `up` and `dgated` take them."""
        if not gathers_first(self.weights.intermediate_size):
            return tokens
        rows = empty_rows(self.routing, self.weights.hidden_size, tokens)
        self.kernels.rows.gather_rows(tokens, self.routing.row_token, rows, self.stream)
        return rows

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor | None) -> None:
        weights, routing = self.weights, self.routing
        layout = weights.layout.transposed, self._halves
        rows = routing.row_token, routing.padded_offsets
        given, w1 = self._rows_of(x), self._operand(weights.w1)
        outputs, gate = (z, y1), self.kernels.gate
        self.kernels.gemm.up(given, w1, *layout, weights.b1, *rows, *outputs, *gate, *self._launch)

    def up_again(self, x: Tensor, z: Tensor) -> None:
        self.up(x, z, None)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        self._plain(y1, self.weights.w2, self.weights.layout.transposed, self.weights.b2, y2)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        # The same matrices, contracted over their rows.
        self._plain(dz, self.weights.w1_dgrad, not self.weights.layout.transposed, None, dx_rows)

    def _plain(self, a: Tensor, b: Any, transposed: bool, bias: Tensor | None, out: Tensor) -> None:
        offsets = self.routing.padded_offsets
        matrices = self._operand(b)
        self.kernels.gemm.grouped_gemm(a, matrices, transposed, bias, offsets, out, *self._launch)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[tiles, R]`."""
        weights, routing = self.weights, self.routing
        tiles = -(-weights.intermediate_size // _TILE_COLUMNS)
        partials = empty((tiles, routing.num_rows), torch.float32, device_of(dout))
        layout = weights.layout.transposed, self._halves
        rows = routing.row_prob, routing.row_token, routing.padded_offsets
        outputs = dz, y1s, partials
        w2 = self._operand(weights.w2_dgrad)
        given, gate = self._rows_of(dout), self.kernels.gate
        self.kernels.dgated.dgated(given, w2, *layout, z, *rows, *outputs, *gate, *self._launch)
        return partials

    def dprobs(self, partials: Tensor, dout: Tensor) -> Tensor:
        if self.weights.b2 is None:
            return sum_to_slots(partials, self.routing)
        return super().dprobs(partials, dout)

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        of_rows = partials.transpose(0, 1).contiguous()
        sums: Tensor = self.row_sums_of(of_rows, dout, self.weights.b2)
        return sums

    def shown(self, name: str, operand: Tensor) -> Tensor:
        if name in ("z", "dz") and self._halves:
            return shown_in_turns(name, operand)
        return tap(name, operand)


def add_gradients(
    pending: PendingWgrad, targets: GradientTargets, biases: tuple[Tensor, Tensor] | None
) -> None:
    """`backward_dw` of operands that are there. biases: `Engine.bias_gradients`, where the targets want
    these.
    """
    late = targets if isinstance(targets, FreshTargets) and targets.make_down else None
    if pending.routing.num_rows == 0:
        if late is not None:
            late.take_down()
        write_zeros(targets)
        return
    dz = plain_operand(pending.dz)
    kernels = wgrad_on(device_name(dz), dtype_name(dz.dtype))
    del dz  # its memory may be wanted before the end
    order = pending.split_half, is_glu(pending.settings.activation)
    into_dw1, into_dw2 = _destinations(kernels.destinations, targets, *order)
    targets.adding = True
    if biases is not None:
        targets.add_biases(*biases, split_half=pending.split_half)
    if late is not None:
        # dz is larger than y1s, and its memory is free for dw2.
        _add_dw1(kernels, pending, into_dw1)
        pending.x = pending.dz = None
        late.take_down()
        into_dw2 = _destinations(kernels.destinations, targets, *order)[1]
    _add_dw2(kernels, pending, into_dw2)
    if pending.settings.frees_stagewise:
        pending.dout = pending.y1s = None
    if late is None:
        _add_dw1(kernels, pending, into_dw1)
    targets.adding = False


def _add_dw1(kernels: Wgrad, pending: PendingWgrad, destination: Any | None) -> None:
    if destination is not None:
        with stage("dw1"):
            x, dz = plain_tokens(pending.x), plain_operand(pending.dz)
            _wgrad(kernels, pending, x, dz, destination, False)


def _add_dw2(kernels: Wgrad, pending: PendingWgrad, destination: Any | None) -> None:
    if destination is not None:
        with stage("dw2"):
            dout = plain_tokens(pending.dout)
            _wgrad(kernels, pending, dout, pending.y1s, destination, True)


def _wgrad(
    kernels: Wgrad,
    pending: PendingWgrad,
    tokens: Tensor,
    rows: Tensor,
    destination: Any,
    tokens_first: bool,
) -> None:
    routing, launch = pending.routing, (pending.settings.gemm_num_sms, current_stream(rows))
    of_rows = routing.row_token, routing.padded_offsets, routing.expert_counts
    kernels.module.wgrad(tokens, rows, tokens_first, *of_rows, destination, *launch)


def _destinations(
    made: Destinations, targets: GradientTargets, split_half: bool, gated: bool
) -> tuple[Any | None, Any | None]:
    """Of dw1 and dw2; None where nobody wants it. split_half: of dz's columns. gated: whether these
    are gates and up values.
    """
    if isinstance(targets, NativeBuffer):
        return _native(made, targets.dw1, split_half), _native(made, targets.dw2, False)
    assert isinstance(targets, ParameterTargets)
    problem = _order_problem(targets, split_half, gated)
    if problem is not None:
        raise ConfigError(f"the BF16 GEMMs cannot leave gradients there: {problem}")
    outputs = WRITTEN if isinstance(targets, FreshTargets) else ADDED
    up, down = targets.up, targets.down
    # Gates and up values of dz's halves, where the gradient has them in turns, are two parts of it.
    apart = split_half and not up.layout.split_half

    def find() -> tuple[Any | None, Any | None]:
        dw1 = None
        if up.is_wanted:
            dw1 = _in_turns(made, up, outputs) if apart else made.of(up, False, outputs)
        return dw1, made.of(down, False, outputs) if down.is_wanted else None

    return targets.once((made, outputs is WRITTEN, split_half), find)


def _native(made: Destinations, sums: Tensor, apart: bool) -> Any:
    weight = WeightTarget.stacked(sums, int(sums.shape[0]), NATIVE)
    return _in_turns(made, weight, ADDED) if apart else made.of(weight, False, ADDED)


def _in_turns(made: Destinations, weight: WeightTarget, outputs: Any) -> Any:
    """Of a gradient with gate and up in turns, as two parts."""
    output = outputs[next(t.dtype for t in weight.tensors if t is not None)]

    def places() -> list[Place]:
        return [
            place._replace(stride_m=2 * place.stride_m, stride_part=place.stride_m)
            for place in weight.places(False)
        ]

    key = (output, "in turns", weight.layout.transposed, weight.num_experts, weight.fingerprint)
    return made.once(key, weight.native_size, places, True, output)


def problem_of(targets: ParameterTargets, layout: WeightLayout, gated: bool) -> str | None:
    """Why the GEMMs cannot leave gradients there where weights lie so, or None."""
    return targets.once(("sm90", layout), lambda: _problem_of(targets, layout, gated))


def _problem_of(targets: ParameterTargets, layout: WeightLayout, gated: bool) -> str | None:
    return targets.copy_engine_problem() or _order_problem(targets, layout.split_half, gated)


def _order_problem(targets: ParameterTargets, split_half: bool, gated: bool) -> str | None:
    """Why dz whose columns lie so gives no gradients in the order of these."""
    up = targets.up
    if not gated or not up.is_wanted or up.layout.split_half == split_half:
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


def _is_along_hidden(weight: WeightTarget, tensor: Tensor) -> bool:
    hidden = -2 if weight.layout.transposed else -1
    return int(tensor.stride()[hidden]) == 1
