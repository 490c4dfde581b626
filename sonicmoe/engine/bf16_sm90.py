"""The passes of the BF16 engine on Hopper: the programs of `bf16_program` over kernels of our own. They
read weights and leave gradients where the caller has them: transposed or not, gate and up in halves or
in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..enums import ActivationType, is_glu
from ..errors import ConfigError
from ..interop import count_write, current_stream, device_name, dtype_name, empty
from ..kernels import cuda_sources
from ..kernels.cuda_wgrad import expert_rows_module, low_rank_source
from ..kernels.host import program_source
from ..kernels.sm90 import bf16_sources, gathers_first, launch_parameters
from ..layouts import GateUp, WeightLayout
from ..observe import tap
from ..routing.backends import arch_of
from ..routing.combine import scatter_to_slots
from .bf16_program import BINDS, KERNELS, PASSES, VOCABULARIES, WGRAD
from .expert_matrices import ExpertMatrices
from .expert_rows import ExpertRows
from .footprint import MAX_KNOWN
from .gradient_places import GradientPlaces, wgrad_destination
from .interface import EngineWeights
from .products import plain_operand, write_zeros
from .routed_layer import Operands, RoutedLayer, add_products
from .routed_passes import (
    FACTORS,
    OF_ADAPTERS,
    OF_LAUNCHES,
    RoutedPasses,
    exported_by,
    factors_of,
)
from .settings import EngineSettings
from .targets import GradientTargets
from .tokens import PendingWgrad, Saved, plain_tokens

Tensor = torch.Tensor


class Passes(RoutedPasses):
    """The passes to the tokens over one set of kernels. matrices: makes of addresses, rows and columns
    of `ExpertMatrices` what they take, once; None where weights are stacked. gate: the parameters of
    the activation, as `up` and `dgated` take them.
    """

    def __init__(
        self, native: Any, kernels: Mapping[str, Any], dtype: str, matrices: Any, gate: Any
    ) -> None:
        super().__init__(native, kernels, VOCABULARIES[dtype], PASSES, BINDS)
        self.dprob_columns = int(native.numbers()["dprob_columns"])
        self.matrices, self.gate = matrices, gate


class Wgrad(RoutedPasses):
    """The pass of weight gradients, and what makes where these go."""

    def __init__(self, native: Any, module: Any, dtype: str) -> None:
        super().__init__(native, {"wgrad": module.wgrad}, VOCABULARIES[dtype], WGRAD)
        self.make_destination = module.wgrad_destination


@functools.lru_cache(maxsize=64)
def passes_on(
    device: str,
    activation: Any,
    parameters: Any,
    dtype: str,
    rows_first: bool,
    separate: bool,
    low_rank: bool,
) -> Passes:
    """Over kernels that are loaded, or compiled, at the first call; errors as `CudaSource.load`."""
    arch = arch_of(device)
    sources = bf16_sources(arch, activation, dtype, rows_first, separate, low_rank)
    gemm, dgated = (sources[name].load() for name in ("bf16_gemm", "bf16_dgated"))
    others = [source.load() for source in cuda_sources(arch)]
    if low_rank:
        others.append(low_rank_source(arch).load())
    modules = gemm, dgated, expert_rows_module(arch), *others
    kernels = exported_by(modules, (*KERNELS, *OF_ADAPTERS))
    # Of addresses that stay, as parameters' do, maps are encoded once.
    kept = functools.lru_cache(maxsize=MAX_KNOWN)
    matrices = kept(gemm.expert_matrices) if separate else None
    # Both modules name the parameters in one order, that of the activation's struct.
    _, *gate = launch_parameters(gemm.activation_names(), activation, parameters)
    return Passes(program_source(arch).load(), kernels, dtype, matrices, gate)


@functools.lru_cache(maxsize=16)
def wgrad_on(device: str, dtype: str) -> Wgrad:
    """The kernel of weight gradients of every activation, loaded or compiled at the first call."""
    arch = arch_of(device)
    module = bf16_sources(arch, ActivationType.SWIGLU, dtype)["bf16_wgrad"].load()
    return Wgrad(program_source(arch).load(), module, dtype)


class Bf16Layer(RoutedLayer):
    """See `RoutedLayer`. z and dz have their columns in the order of w1's rows."""

    with_dgated, parts_of_b = "", "gradient_parts"

    def _bind(
        self, anchor: Tensor, weights: EngineWeights, settings: EngineSettings, backward: bool
    ) -> tuple[Passes, Any]:
        adapters, layout, dtype = weights.adapters, weights.layout, anchor.dtype
        own = settings.activation, settings.activation_parameters, dtype_name(dtype)
        form = gathers_first(weights.intermediate_size), isinstance(weights.w1, ExpertMatrices)
        passes = passes_on(device_name(anchor), *own, *form, adapters is not None)
        factors = factors_of(adapters, passes.kernels, dtype, settings, backward, self._stream)
        if "up_b_t" in factors:
            factors["up_b_t"] = _order_of(weights).user_b1(factors["up_b_t"])
        (first, second), scales = passes.gate, (0.0, 0.0) if adapters is None else adapters.scales
        return passes, passes.bind(
            transposed=layout.transposed,
            by_rows=not layout.transposed,
            first=first,
            second=second,
            **{name: factors.get(name) for name in FACTORS},
            **dict(zip(OF_LAUNCHES, (*scales, settings.gemm_num_sms), strict=True)),
        )

    def empty_z(self) -> Tensor:
        return self._empty_rows(self._weights.n1)

    def _empty_rows(self, width: int) -> Tensor:
        return empty((self._routing.num_rows, width), self.dtype, self.device)  # type: ignore[no-any-return]

    def _token_rows(self) -> Tensor | None:
        is_first = gathers_first(self._weights.intermediate_size)
        return self.scratch("rows_scratch", "token_rows") if is_first else None

    def _operand(self, weight: Any) -> tuple[Any, Any]:
        """A weight as the kernels take it, and the tensor of its second half, if there are two."""
        if type(weight) is GateUp:
            return weight
        if not isinstance(weight, ExpertMatrices):
            return weight, None
        return self._passes.matrices(weight.addresses, *weight.shape[1:]), None

    def forward(self, x: Tensor, z: Tensor | None, out: Tensor | None) -> None:
        weights = self._weights
        w1, w1_up = self._operand(weights.w1)
        self._passes.forward(
            weights=self._handle,
            stream=self._stream,
            halves=weights.layout.split_half,
            routing=self.routed.routing,
            x=x,
            z=z,
            out=out,
            # Recomputing stops at z: y1 and the down projection are not needed.
            scratch=None if out is None else self.scratch("scratch", "y2"),
            rows_scratch=self._token_rows(),
            w1=w1,
            w1_up=w1_up,
            w2=self._operand(weights.w2)[0],
            b1=weights.b1,
            b2=weights.b2,
            up_u=self.u.up,
            down_u=self.u.down,
        )

    def goes_apart(self, saved: Saved) -> bool:
        """For z, or for gathered rows of dout, which large layers have."""
        return self._settings.frees_stagewise or gathers_first(self._weights.intermediate_size)

    def empty_operands(self, saved: Saved, z: Tensor) -> Operands:
        # A tile reads its part of z before it writes the same part of dz.
        dz = z if saved.donated or saved.z is None else self.empty_z()
        return dz, self._empty_rows(self._weights.intermediate_size), True

    def dgated(
        self, dout: Tensor, z: Tensor, operands: Operands, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """dprobs of a layer with biases are sums of whole rows, with `<dout, b2>`."""
        weights, routing = self._weights, self._routing
        (dz, y1s, _), (w1, w1_up) = operands, self._operand(weights.w1_dgrad)
        partials = dprobs = None
        if weights.b2 is None:
            dprobs = empty((routing.num_tokens, routing.topk), torch.float32, self.device)
        else:
            tiles = -(-weights.intermediate_size // self._passes.dprob_columns)
            partials = empty((tiles, routing.num_rows), torch.float32, self.device)
        scratch = self.scratch("dz_scratch", "dprob_parts" if dx is None else "dx_rows")
        token_rows = self._token_rows()
        try:
            self._passes.dgated(
                weights=self._handle,
                stream=self._stream,
                halves=weights.layout.split_half,
                routing=self.routed.routing,
                dout=dout,
                z=z,
                dz=dz,
                y1s=y1s,
                dprobs=dprobs,
                partials=partials,
                dz_scratch=scratch,
                rows_scratch=token_rows,
                dx=dx,
                w1=w1,
                w1_up=w1_up,
                w2=self._operand(weights.w2_dgrad)[0],
                up_v=self.v.up,
                down_v=self.v.down,
            )
        finally:
            # Where a launch fails nobody knows which have run.
            if dz is z:
                count_write(z)
        if partials is not None:
            of_rows = partials.transpose(0, 1).contiguous()
            sums = ExpertRows.of(routing).sum_partials(of_rows, dout, weights.b2)
            dprobs = scatter_to_slots(sums, routing)
        assert dz is not None and dprobs is not None
        return dz, tap("ds", dprobs)

    def dgrad(self, dz: Tensor, x: Tensor) -> Tensor:
        dx, (w1, w1_up) = self.empty_dx(x), self._operand(self._weights.w1_dgrad)
        given = {"weights": self._handle, "stream": self._stream}
        scratch, v = self.scratch("dx_scratch", "dx_rows"), self.v.up
        operands = {"dz": dz, "dx": dx, "dx_scratch": scratch, "w1": w1, "w1_up": w1_up, "up_v": v}
        self._passes.dgrad(**given, routing=self.routed.routing, **operands)
        return dx

    def sums_of_factors(
        self, x: Tensor, dout: Tensor, operands: Operands
    ) -> tuple[Tensor | None, ...]:
        (dz, y1s, _), u, v = operands, self.u, self.v
        narrow = {"up_u": u.up, "up_v": v.up, "down_u": u.down, "down_v": v.down}
        sums = self.factor_gradients("ab")
        up_a, up_b, *of_down = self.sum_factors(x=x, dz=dz, dout=dout, y1s=y1s, **narrow, **sums)
        order = _order_of(self._weights)
        return up_a, None if up_b is None else order.native_w1(up_b), *of_down


def _order_of(weights: EngineWeights) -> WeightLayout:
    """Of the columns of dz."""
    return WeightLayout(split_half=weights.layout.split_half)


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
    sizes = int(plain_tokens(pending.x).shape[1]), int(pending.y1s.shape[1])
    shared = {
        "routing": kernels.routed(pending.routing, *sizes).routing,
        "stream": current_stream(dz),
        "multiprocessors": pending.settings.gemm_num_sms,
    }
    del dz  # its memory may be wanted before the end
    order = pending.split_half, is_glu(pending.settings.activation)

    def launch(dw1: Any, dw2: Any) -> None:
        given = {"x": pending.x, "dout": pending.dout, "dz": pending.dz, "y1s": pending.y1s}
        kernels.wgrad(**shared, **given, dw1=dw1, dw2=dw2)

    find = partial(_destinations, kernels, targets, *order)
    add_products(pending, targets, find, launch, pending.settings.frees_stagewise, biases)


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
