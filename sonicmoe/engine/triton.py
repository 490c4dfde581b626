"""The Triton engine, for every GPU that Triton compiles for: grouped GEMMs of `kernels/triton` in
bfloat16 or float16, with gather, activation and its gradient fused; `products` has the passes.

dz lies gate first, `[R, 2, I]`: see `kernels/triton/gemms.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError
from ..interop import IS_PADDLE, device_name, device_of, dtype_name
from ..layouts import NATIVE, WeightLayout
from ..observe import tap
from ..routing.backends import take_driver_from_paddle
from ..routing.metadata import RoutingMetadata
from .gpu import gpu_of
from .gradient_places import GradientPlaces, MatrixPlace
from .interface import EngineWeights
from .kernel_jobs import expert_shape
from .plain_engine import PlainEngine
from .products import Products, Wgrads, plain_operand, shown_in_turns
from .settings import EngineSettings, GradientMode
from .targets import GradientTargets
from .tokens import PendingWgrad, plain_tokens

Tensor = torch.Tensor


class TritonEngine(PlainEngine):
    """See the module docstring; `capabilities.TRITON` says what it takes."""

    name = "triton"

    @contextmanager
    def _products(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> Iterator[Products]:
        # Kernels are compiled for H and I, and for no number of tokens.
        sizes = weights.hidden_size, weights.intermediate_size
        with _launch_scope(x):
            calls = _calls(sizes, settings, weights.b1 is not None, x)
            yield _TritonProducts(routing, weights, calls, index_of(calls, routing))

    def _sum_biases(self, pending: PendingWgrad, db1: Tensor, db2: Tensor) -> None:
        dout = plain_tokens(pending.dout)
        with _launch_scope(dout):
            calls = _calls(_sizes(pending), pending.settings, True, dout)
            rows = index_of(calls, pending.routing)
            calls.column_sums(dout, pending.routing.row_prob, db2, rows).launch()
            calls.column_sums(plain_operand(pending.dz), None, db1, rows).launch()

    @contextmanager
    def _wgrads(self, pending: PendingWgrad, targets: GradientTargets) -> Iterator[Wgrads]:
        x, found = plain_tokens(pending.x), dict[str, Any]()
        with _launch_scope(x):
            calls = _calls(_sizes(pending), pending.settings, targets.has_biases, x)
            rows = index_of(calls, pending.routing)
            into_dw1, into_dw2 = _outputs_of(targets, calls)

            # No operand has a name that lasts: their memory is free when all references are gone.
            def dw2() -> Any:
                return calls.wgrad_down(pending.dout, pending.y1s, into_dw2, rows)

            def dw1() -> Any:
                return calls.wgrad_up(pending.x, plain_operand(pending.dz), into_dw1, rows)

            for name, make, into in (("dw2", dw2, into_dw2), ("dw1", dw1, into_dw1)):
                if into is not None:
                    make().load()
                    found[name] = partial(_launch, make)
            yield found

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        return _problem_of(targets)


@dataclass(eq=False)
class _TritonProducts(Products):
    """The products of one shape; every argument is named in `kernels.triton.launches.Calls`."""

    calls: Any
    rows: Any

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor | None) -> None:
        w1 = plain_operand(self.weights.w1)
        self.calls.up(x, w1, self.weights.b1, z, y1, self.rows).launch()

    def up_again(self, x: Tensor, z: Tensor) -> None:
        self.up(x, z, None)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        w2 = plain_operand(self.weights.w2)
        self.calls.down(y1, w2, self.weights.b2, y2, self.rows).launch()

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[tiles, R]`."""
        w2, prob = plain_operand(self.weights.w2_dgrad), self.routing.row_prob
        sizes = (self.calls.dprob_tiles, self.routing.num_rows)
        partials = torch.empty(sizes, dtype=torch.float32, device=dout.device)
        self.calls.dgated(dout, w2, z, dz, y1s, prob, partials, self.rows).launch()
        return partials

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        sums = torch.empty((self.routing.num_rows,), dtype=torch.float32, device=dout.device)
        self.calls.row_sums(partials, dout, self.weights.b2, sums, self.rows).launch()
        return sums

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        self.calls.dgrad(dz, plain_operand(self.weights.w1_dgrad), dx_rows, self.rows).launch()

    @property
    def splits_dz(self) -> bool:
        return bool(self.calls.shape.parts == 2)

    def shown(self, name: str, operand: Tensor) -> Tensor:
        if name != "dz" or self.calls.shape.parts == 1:
            return tap(name, operand)
        return shown_in_turns(name, operand)


def _launch(make: Callable[[], Any]) -> None:
    make().launch()


def _sizes(pending: PendingWgrad) -> tuple[int, int]:
    """H and I."""
    return int(plain_tokens(pending.x).shape[1]), int(pending.y1s.shape[1])


def _calls(sizes: tuple[int, int], settings: EngineSettings, bias: bool, like: Tensor) -> Any:
    """The launches of a model with these H and I, for tokens like these."""
    gpu = gpu_of(device_name(like))
    lent = gpu.lent(settings)
    shape = expert_shape(settings, sizes, dtype_name(like.dtype), bias, gpu.arch)
    return _launches().calls(shape, lent if lent < gpu.multiprocessors else 0)


def index_of(calls: Any, routing: RoutingMetadata) -> Any:
    """The rows of each expert as the kernels want them, made on the device."""
    device = device_of(routing.row_token)

    def empty(size: int) -> Tensor:
        return torch.empty((size,), dtype=torch.int32, device=device)

    module = _launches()
    rows = module.Rows(
        empty(routing.num_rows),
        empty(routing.num_rows // module.rows.TILE_ROWS),
        empty(routing.num_experts + 1),
        routing.padded_offsets,
        routing.num_rows,
        routing.num_experts,
    )
    calls.index_rows(routing.row_token, routing.expert_counts, rows).launch()
    return rows


@functools.cache
def _launches() -> Any:
    # Triton is imported when a kernel is wanted, and a machine without it can still load this file.
    from ..kernels.triton import launches

    if IS_PADDLE:
        take_driver_from_paddle()
    return launches


def _launch_scope(tensor: Tensor) -> AbstractContextManager[Any]:
    """The device of the caller: Triton launches on the current one, on its current stream."""
    # Under Paddle a process has one GPU, and `take_driver_from_paddle` names the stream.
    if IS_PADDLE:
        return nullcontext()
    return torch.cuda.device(tensor.device)


# ---- where weight gradients go ----

# The GEMMs write through strides, so every layout of the parameters serves: stacked or a tensor per
# expert, transposed or not, gate and up in turns or apart.


def _outputs_of(targets: GradientTargets, calls: Any) -> tuple[Any, Any]:
    """The memory of dw1 and dw2 as a `kernels.triton.launches.GradientOutput`, None where nobody
    wants that gradient; ConfigError names the reason for which the GEMMs cannot leave them there.
    `calls`: the launches of the model.
    """
    adds = targets.mode is not GradientMode.FRESH
    # Memory that was made for this backward overlaps nothing.
    problem = _problem_of(targets) if adds else _stride_problem(targets)
    if problem is not None:
        raise ConfigError(f"the Triton GEMMs cannot add to these parameters: {problem}")
    return _output(targets.up, calls.shape.parts, adds), _output(targets.down, 1, adds)


def _problem_of(targets: GradientTargets) -> str | None:
    """Why the GEMMs cannot add to this memory: one sentence, or None."""
    # The promise of 16 bytes is the copy engine's too, and so is that nothing overlaps.
    found = targets.copy_engine_problem()
    return found or targets.once("triton", lambda: _stride_problem(targets))


def _stride_problem(targets: GradientTargets) -> str | None:
    for name, places in (("up", targets.up), ("down", targets.down)):
        # Addresses may differ, because a table has them. Strides are arguments of the launch.
        if len({place[1:] for place in _wanted(places.places(True))}) > 1:
            return (
                f"the experts' {name}-projection gradients have different strides, and the Triton "
                "GEMMs take one for all"
            )
    return None


def _wanted(found: list[MatrixPlace]) -> list[MatrixPlace]:
    # Frozen experts have address 0, and no say in this.
    return [place for place in found if place.address]


def _output(places: GradientPlaces, parts: int, adds: bool) -> Any:
    # Triton is loaded: `calls` is of this module.
    from ..kernels.triton import launches

    tensor = places.first
    if tensor is None:
        return None
    every = places.places(parts == 2)
    one = _wanted(every)[0]
    pitch, step_m = (one.stride_m, 0) if one.stride_n == 1 else (one.stride_n, one.stride_m)
    part = one.stride_part if parts == 2 else one.stride_m
    strides = (part, pitch, step_m, int(tensor.element_size()))
    if places.is_stacked:
        return launches.GradientOutput(tensor, int(tensor.stride()[-3]), *strides, adds=adds)
    # Launches fill the table: a copy from pageable memory would wait for the device.
    addresses = torch.empty((len(every),), dtype=torch.int64, device=device_of(tensor))
    for call in launches.addresses_calls(addresses, [place.address for place in every]):
        call.launch()
    return launches.GradientOutput(tensor, 0, *strides, addresses=addresses, adds=adds)
