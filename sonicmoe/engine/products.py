"""The passes of the engines that launch one product after the other: `bf16` and `triton` on plain
operands, `mxfp8` on operands that it quantises between the products.

    forward       z, y1 = up(x)            y2 = down(y1)         out = weighted sum per token
    backward_dx   dz, y1s, dprobs = dgated(dout, z)              dx = sum per token of dgrad(dz)
    backward_dw   dw2 += dout^T y1s        dw1 += dz^T x

Rounds where the reference engine rounds: z, y2, dz, y1s and dx rows to the dtype of the tokens, and
y1 where it stays plain; everything between is fp32. Waits for nothing, allocates by
`routing.num_rows`, adds in a fixed order: equal calls give equal bits.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..interop import aligned, device_of, empty, plain_ops
from ..layouts import WeightLayout
from ..observe import is_heard, staged, tap
from ..routing.combine import aggregate, scatter_to_slots
from ..routing.metadata import RoutingMetadata
from .border import check_dout, check_forward, require_operands
from .interface import Engine, EngineWeights
from .settings import EngineSettings, GradientMode
from .targets import GradientTargets
from .tokens import PendingWgrad, Saved, Tokens, plain_tokens

Tensor = torch.Tensor
Wgrads = dict[str, Callable[[], None]]  # what launches dw1, and dw2


@dataclass(eq=False)
class Products(ABC):
    """The products of one layer over the rows of one routing. Each call launches, and waits for
    nothing.
    """

    routing: RoutingMetadata
    weights: EngineWeights

    def tokens(self, name: str, values: Tensor) -> Any:
        """x `[T, H]` as `up` reads it, or dout as `dgated` does, by its name."""
        return values

    def empty_y1(self, like: Tensor) -> Any:
        """Unwritten y1 `[R, I]`, as `up` writes and `down` reads it."""
        return empty_rows(self.routing, self.weights.intermediate_size, like)

    @abstractmethod
    def up(self, x: Any, z: Tensor | None, y1: Any) -> None:
        """x, gathered -> z `[R, N1]` unless None, y1 `[R, I]`."""

    @abstractmethod
    def up_again(self, x: Any, z: Tensor) -> None:
        """The z that `up` would have written, to the same bits."""

    @abstractmethod
    def down(self, y1: Any, y2: Tensor) -> None:
        """y1 `[R, I]` -> y2 `[R, H]`."""

    @abstractmethod
    def dgated(self, dout: Any, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """dout, gathered, z `[R, N1]` -> dz as `up` has z, y1s `[R, I]`. Returns partial sums of
        `<dy1, y1>`, one of each row and tile, in an order of the engine's own.
        """

    def dprobs(self, partials: Tensor, dout: Tensor) -> Tensor:
        """fp32 `[T, K]`: the gradient of each slot's probability, 0 in invalid slots."""
        return scatter_to_slots(self.row_sums(partials, dout), self.routing)

    @abstractmethod
    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        """fp32 `[R]`: the gradient of each row's probability. Partial sums are added in a fixed
        order, and `<dout, b2>` of the row where there is a bias.
        """

    def settle(self, pending: PendingWgrad, dout: Any) -> Any:
        """dz as `dgrad` reads it. What wgrad will read instead of dz, y1s and this dout goes into
        `pending`.
        """
        return pending.dz

    @abstractmethod
    def dgrad(self, dz: Any, dx_rows: Tensor) -> None:
        """dz -> dx_rows `[R, H]`."""

    @property
    def splits_dz(self) -> bool:
        """The columns of dz are gates and then up values, else as the rows of a native w1."""
        return False

    def shown(self, name: str, operand: Any) -> Any:
        """`tap`, in the form that listeners know."""
        return tap(name, operand)


class ProductsEngine(Engine):
    """All of such an engine but its weights, its `Products` and the addition of weight gradients;
    its record says what it takes.
    """

    @abstractmethod
    def _products(
        self, x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
    ) -> AbstractContextManager[Products]:
        """The products of these weights and rows, launched on the caller's device and stream."""

    def _adapted(self, products: Products, settings: EngineSettings, projected: Any) -> Any:
        """The products of a layer that has adapters. `projected`: their part of `Saved`."""
        return products

    @abstractmethod
    def _wgrads(
        self, pending: PendingWgrad, targets: GradientTargets
    ) -> AbstractContextManager[Wgrads]:
        """The weight gradients that anybody wants. All memory is taken and all kernels are loaded before
        this returns, so that running out of memory leaves the targets as they were.
        """

    def _add(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """`backward_dw` where all operands are there; they are released afterwards."""
        if pending.routing.num_rows == 0:
            write_zeros(targets)
            return
        biases = self.bias_gradients(pending) if targets.has_biases else None
        with self._wgrads(pending, targets) as launches:
            targets.adding = True
            if biases is not None:
                targets.add_biases(*biases, split_half=False)
            if "dw2" in launches:
                staged("dw2", launches.pop("dw2"))
            if pending.settings.frees_stagewise:
                pending.dout = pending.y1s = pending.native = None
            if "dw1" in launches:
                staged("dw1", launches.pop("dw1"))
            targets.adding = False

    def _check_tokens(self, x: Tokens, weights: EngineWeights) -> None:
        """What this engine asks for beside `check_forward`."""

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
        self._check_tokens(x, weights)
        with plain_ops():
            x = plain_tokens(aligned(x, detached=False))  # others were refused
            # The kernel writes z only where it is given memory for it.
            keeps_z = save and not settings.recompute_z
            z = empty_rows(routing, weights.n1, x) if keeps_z else None
            projected = None
            if weights.adapters is not None:
                projected = empty_rows(routing, sum(weights.adapters.widths), x)
            saved = Saved(settings, routing, x, z, projected=projected) if save else None
            # A rank may receive no valid slot. Then there is nothing to launch, and every output is
            # zero.
            if routing.num_rows == 0:
                out = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                return out, saved
            with self._products(x, weights, settings, routing) as own:
                products = own if projected is None else self._adapted(own, settings, projected)
                rows, y1 = products.tokens("x", x), products.empty_y1(x)
                y2 = empty_rows(routing, weights.hidden_size, x)
                staged("up", products.up, rows, z, y1)
                # `up` alone reads quantised tokens, and their memory is free from here on.
                del rows
                if saved is not None and z is not None:
                    saved.z = products.shown("z", z)
                y1 = products.shown("y1", y1)
                staged("down", products.down, y1, y2)
            out = staged("aggregate_out", aggregate, tap("y2", y2), routing, True)
            return tap("out", out), saved

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
            dz = empty_rows(routing, weights.n1, x)
            y1s = empty_rows(routing, weights.intermediate_size, x)
            # `pending` keeps x and dout alive until the weight gradients are added. It alone keeps
            # dz and y1s: what `settle` puts in their place frees them.
            pending = PendingWgrad(settings, routing, x, dout, dz, y1s)
            del dz, y1s
            if weights.adapters is not None:
                pending.adapters = partial(weights.adapters.cut, (None,) * 4)
            if routing.num_rows == 0:
                dx = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
                slots = routing.num_tokens, routing.topk
                dprobs = torch.zeros(slots, dtype=torch.float32, device=x.device)
            else:
                with self._products(x, weights, settings, routing) as own:
                    products: Any = own
                    # A compiled graph passes on memory for them in any case.
                    if weights.adapters is not None:
                        products = self._adapted(own, settings, saved.projected)
                    dprobs, dz = _dgated(products, saved, pending)
                    dx_rows = empty_rows(routing, weights.hidden_size, x)
                    staged("dx_gemm", products.dgrad, dz, dx_rows)
                    if weights.adapters is not None:
                        pending.adapters = partial(products.gradients, x)
                dx_rows = tap("dx_rows", dx_rows)
                dx = tap("dx", staged("aggregate_dx", aggregate, dx_rows, routing, False))
                dprobs = tap("ds", dprobs)
            # `pending` has its own reference to x. Without one here `check_dout` refuses a second
            # backward, which the freed z could not serve.
            if settings.frees_stagewise:
                saved.x = None
            return dx, dprobs, pending

    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """A GEMM for each projection that anybody wants the gradient of, and the bias sums; ConfigError
        with the reason of `problem_of` where it cannot add to these targets.
        """
        require_operands(pending)
        with plain_ops():
            self._add(pending, targets)
        pending.x = pending.dout = pending.dz = pending.y1s = pending.native = None


def _dgated(products: Products, saved: Saved, pending: PendingWgrad) -> tuple[Tensor, Any]:
    """`(fp32 [T, K], the gradient of each probability; dz as dgrad reads it)`, and the operands of wgrad
    in `pending`.
    """
    dout, dz, y1s = plain_tokens(pending.dout), pending.dz, pending.y1s
    rows = products.tokens("dout", dout)
    z = _restored_z(products, saved, dz)
    # A tile sums <dy1, y1> over its own columns. The partial sums are added in a second launch and
    # in a fixed order, because atomics would change the order, and the bits, from run to run.
    partials = staged("dgated", products.dgated, rows, z, dz, y1s)
    # Only now: where memory ran out above, the backward may be repeated.
    if saved.settings.frees_stagewise:
        saved.z = None
    del z
    dprobs = products.dprobs(partials, dout)
    pending.dz, pending.y1s = products.shown("dz", dz), tap("y1s", y1s)
    del dz, y1s
    return dprobs, products.settle(pending, rows)


def _restored_z(products: Products, saved: Saved, like: Tensor) -> Tensor:
    """z as forward wrote it, or computed again to the same bits."""
    if saved.z is not None:
        return plain_operand(saved.z)
    z = empty_rows(saved.routing, int(like.shape[1]), like)
    products.up_again(products.tokens("x", plain_tokens(saved.x)), z)
    return z


def shown_in_turns(name: str, halves: Tensor) -> Tensor:
    """`tap` of dz whose columns are all gates and then all up values, in the order that listeners
    know: gate and up in turns.
    """
    if not is_heard():
        return halves
    order = WeightLayout(split_half=True)
    turns = order.native_b1(halves)
    shown = tap(name, turns)
    return halves if shown is turns else order.user_b1(shown)


def write_zeros(targets: GradientTargets) -> None:
    """No expert has a row: what is added to stays, and what is written is zeros."""
    if targets.mode is GradientMode.FRESH:
        targets.take_down()
        for tensor in targets.tensors():
            tensor.zero_()


def empty_rows(routing: RoutingMetadata, width: int, like: Tensor) -> Tensor:
    """Unwritten `[R, width]`."""
    return empty((routing.num_rows, width), like.dtype, device_of(like))  # type: ignore[no-any-return]


def plain_operand(operand: Any) -> Tensor:
    """A tensor that is not block-scaled: `check_forward` has refused the others."""
    assert isinstance(operand, torch.Tensor)
    return operand
