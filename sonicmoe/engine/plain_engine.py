"""The engines that quantise nothing, but for their kernels: `bf16` and `triton` read the native
weights where they lie, in bfloat16 or float16, and launch the same products in the same steps.

    forward       z, y1 = up(x)            y2 = down(y1)         out = weighted sum per token
    backward_dx   dz, y1s, dprobs = dgated(dout, z)              dx = sum per token of dgrad(dz)
    backward_dw   dw2 += dout^T y1s        dw1 += dz^T x

Rounds where the reference engine rounds: z, y1, y2, dz, y1s and dx rows to the dtype of the tokens;
everything between is fp32. Waits for nothing, allocates by `routing.num_rows`, adds in a fixed
order: equal calls give equal bits.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ..errors import DeviceError, DTypeError, expect
from ..interop import aligned, device_name, dtype_name, is_cuda, plain_ops
from ..layouts import WeightSource
from ..observe import stage, tap
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from .border import check_dout, check_forward, check_weights, require_operands
from .capabilities import require
from .interface import (
    Change,
    Engine,
    EngineSettings,
    EngineWeights,
    GradientTargets,
    PendingWgrad,
    Saved,
    Tokens,
    plain_tokens,
)
from .settings import Workload

Tensor = torch.Tensor


class Products(ABC):
    """The products of one layer over the rows of one routing. Each call launches, and waits for
    nothing.
    """

    @abstractmethod
    def up(self, x: Tensor, z: Tensor | None, y1: Tensor) -> None:
        """x `[T, H]`, gathered -> z `[R, N1]` unless None, y1 `[R, I]`."""

    @abstractmethod
    def up_again(self, x: Tensor, z: Tensor) -> None:
        """The z that `up` would have written, to the same bits."""

    @abstractmethod
    def down(self, y1: Tensor, y2: Tensor) -> None:
        """y1 `[R, I]` -> y2 `[R, H]`."""

    @abstractmethod
    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """dout `[T, H]`, gathered, z `[R, N1]` -> dz as `up` has z, y1s `[R, I]`. Returns partial
        sums of `<dy1, y1>`, one of each row and tile, in an order of the engine's own.
        """

    @abstractmethod
    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        """fp32 `[R]`: the gradient of each row's probability. Partial sums are added in a fixed
        order, and `<dout, b2>` of the row where there is a bias.
        """

    @abstractmethod
    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        """dz -> dx_rows `[R, H]`."""

    def shown_dz(self, dz: Tensor) -> Tensor:
        """`tap` of dz, which listeners know in (gate, up) pairs."""
        return tap("dz", dz)


class PlainEngine(Engine):
    """All of such an engine but its `Products` and the addition of weight gradients; its record
    says what it takes.
    """

    @abstractmethod
    def _products(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> AbstractContextManager[Products]:
        """The products of these weights and rows, launched on the caller's device and stream."""

    @abstractmethod
    def _add(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """`backward_dw` where all operands are there; they are released afterwards."""

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """The native weights as they are; forward and dgrad read the same storage.

        Raises:
            ConfigError, DTypeError, ShapeError: `capabilities.require` finds a problem, or the
                weights do not fit together, or are of two dtypes.
            DeviceError: they are not on a GPU.
        """
        check_weights(w1, w2, b1, b2, settings.activation)
        record = self.record
        dtypes = [dtype_name(weight.dtype) for weight in (w1, w2)]
        expect(
            dtypes[0] == dtypes[1] and dtypes[0] in record.dtypes,
            DTypeError,
            f"w1 is {dtypes[0]}, w2 is {dtypes[1]}; "
            f"the {self.name} engine needs both of one of {list(record.dtypes)}",
        )
        sizes = int(w1.shape[2]), int(w2.shape[2])
        require(record, Workload(settings, *sizes, dtypes[0], b1 is not None))
        expect(
            self._runs_beside(w1),
            DeviceError,
            f"w1 is on {device_name(w1)}; "
            f"the {self.name} engine needs a GPU of {', '.join(map(str, record.architectures))}",
        )
        with plain_ops():
            # `aligned` copies only what a 16-byte load could not read. Otherwise these are the
            # user's tensors.
            w1, w2 = aligned(w1), aligned(w2)
            return EngineWeights(w1, w2, w1, w2, _fp32(b1), _fp32(b2))

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        change: Change = Change.YES,
    ) -> EngineWeights:
        """As every engine's; fp32 master weights are rounded to bfloat16, as autocast would."""
        unchanged = previous is not None and change is Change.NO
        # `unchanged` first: in the usual forward nothing of the source is touched.
        masters = not unchanged and source.anchor.dtype == torch.float32
        if masters and source.compute_dtype is None:
            source = replace(source, compute_dtype=torch.bfloat16)
        return super().refresh(source, settings, previous, change)

    def _runs_beside(self, weight: Tensor) -> bool:
        """Whether the kernels run where this weight lies."""
        return is_cuda(weight)

    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """Two GEMMs and a weighted gather-and-sum; `save=False` writes no z."""
        check_forward(x, routing, weights, settings, self.record)
        w1 = plain_operand(weights.w1)
        expect(
            x.dtype == w1.dtype,
            DTypeError,
            f"x is {dtype_name(x.dtype)}; the weights are {dtype_name(w1.dtype)}, and one dtype is needed",
        )
        with plain_ops():
            x = plain_tokens(aligned(x))  # others were refused
            # The kernel writes z only where it is given memory for it.
            keeps_z = save and not settings.recompute_z
            z = empty_rows(routing, int(w1.shape[1]), x) if keeps_z else None
            # A rank may receive no valid slot. Then there is nothing to launch, and every output is
            # zero.
            if routing.num_rows == 0:
                out = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                return out, Saved(settings, routing, x, z) if save else None
            y1 = empty_rows(routing, weights.intermediate_size, x)
            y2 = empty_rows(routing, weights.hidden_size, x)
            with self._products(x, weights, settings, routing) as products:
                with stage("up"):
                    products.up(x, z, y1)
                z = None if z is None else tap("z", z)
                with stage("down"):
                    products.down(tap("y1", y1), y2)
            with stage("aggregate_out"):
                out = tap("out", aggregate(tap("y2", y2), routing, weighted=True))
            return out, Saved(settings, routing, x, z) if save else None

    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """dgated with dprobs' row sums, dgrad, an unweighted gather-and-sum."""
        dout = check_dout(dout, saved, self.record)
        settings, routing, x = saved.settings, saved.routing, plain_tokens(saved.x)
        with plain_ops():
            # The caller's gradient may have another dtype than the tokens; the GEMMs take operands
            # of one.
            dout = plain_tokens(aligned(plain_tokens(dout).to(x.dtype)))
            dz = empty_rows(routing, int(plain_operand(weights.w1_dgrad).shape[1]), x)
            y1s = empty_rows(routing, weights.intermediate_size, x)
            # `pending` keeps x and dout alive until the weight gradients are added.
            pending = PendingWgrad(settings, routing, x, dout, dz, y1s)
            if routing.num_rows == 0:
                dx = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                slots = routing.num_tokens, routing.topk
                dprobs = torch.zeros(slots, dtype=torch.float32, device=x.device)
            else:
                with self._products(x, weights, settings, routing) as products:
                    row_dprob = _dgated(products, dout, saved, dz, y1s)
                    dz = pending.dz = products.shown_dz(dz)
                    pending.y1s = tap("y1s", y1s)
                    dx_rows = empty_rows(routing, weights.hidden_size, x)
                    with stage("dx_gemm"):
                        products.dgrad(dz, dx_rows)
                with stage("aggregate_dx"):
                    dx = tap("dx", aggregate(tap("dx_rows", dx_rows), routing, weighted=False))
                    dprobs = tap("ds", scatter_to_slots(row_dprob, routing))
            # `pending` has its own reference to x. Without one here `check_dout` refuses a second
            # backward, which the freed z could not serve.
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """A GEMM for each projection that anybody wants the gradient of, and the bias sums.

        Raises:
            ConfigError: it cannot add to these targets, for the reason that `problem_of` gives.
        """
        require_operands(pending)
        with plain_ops():
            self._add(pending, targets)
        pending.x = pending.dout = pending.dz = pending.y1s = None


def _dgated(products: Products, dout: Tensor, saved: Saved, dz: Tensor, y1s: Tensor) -> Tensor:
    """Fill dz and y1s; returns fp32 `[R]`, the gradient of each row's probability."""
    z = _restored_z(products, saved, dz)
    # A tile sums <dy1, y1> over its own columns. The partial sums are added in a second launch and
    # in a fixed order, because atomics would change the order, and the bits, from run to run.
    with stage("dgated"):
        partials = products.dgated(dout, z, dz, y1s)
    if saved.settings.frees_stagewise:
        saved.z = None
    return products.row_sums(partials, dout)


def _restored_z(products: Products, saved: Saved, like: Tensor) -> Tensor:
    """z as forward wrote it, or computed again to the same bits."""
    if saved.z is not None:
        return plain_operand(saved.z)
    z = empty_rows(saved.routing, int(like.shape[1]), like)
    products.up_again(plain_tokens(saved.x), z)
    return z


def empty_rows(routing: RoutingMetadata, width: int, like: Tensor) -> Tensor:
    """Unwritten `[R, width]`."""
    return torch.empty((routing.num_rows, width), dtype=like.dtype, device=like.device)


def plain_operand(operand: Any) -> Tensor:
    """A tensor that is not block-scaled: `check_forward` has refused the others."""
    assert isinstance(operand, torch.Tensor)
    return operand


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned(bias.detach().to(torch.float32))
