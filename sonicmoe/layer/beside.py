"""What stands beside the weights of one call of a node: biases of the experts, and low-rank adapters.
They are inputs of its autograd node behind all others, so that autograd adds their gradients
wherever they came from: weights alone have `main_grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..borrowed import Borrowed
from ..engine.interface import Engine, EngineWeights, PendingWgrad
from ..engine.low_rank import Adapters
from ..interop import plain_ops, require_framework_tensor, requires_grad
from ..layouts import WeightLayout
from ..refusals import need_shape
from ..weights.parameters import ExpertParameters

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor
Given = tuple[Tensor, Tensor] | None


class Beside:
    """Biases b1 `[E, N1]` and b2 `[E, H]`, in the order of the rows of w1, and adapters, whose `up.b`
    has that order too; the backward reads all of them where they lie.

    borrowed: the caller's tensors by name. inputs: the same tensors, biases before factors.
    trains_biases: whether one of the biases wants a gradient.
    """

    def __init__(self, biases: Given, adapters: Adapters | None, layer: ExpertParameters) -> None:
        """Check the biases, which may be part of a graph, against the layer."""
        self._layout, self._adapters = layer.layout, adapters
        self.borrowed = Borrowed(named(biases, adapters))
        self.inputs = tuple([tensor for _, tensor in self.borrowed.named])
        self._biases: tuple[Tensor, ...] = ()
        if biases is not None:
            (experts, n1, hidden), _ = layer.native_shapes
            for name, bias, width in zip(("b1", "b2"), biases, (n1, hidden), strict=True):
                require_framework_tensor(bias, name)
                need_shape(tuple(bias.shape) == (experts, width), name, bias, (experts, width))
            self._biases = tuple([bias.detach().to(torch.float32) for bias in biases])
        # Asked now: a bias that is frozen later has its gradient all the same.
        self._wanted = [requires_grad(bias) for bias in self.inputs[: len(self._biases)]]
        self.trains_biases = any(self._wanted)

    def read(self, weights: EngineWeights) -> EngineWeights:
        """The engine's weights with all of this."""
        if self._biases:
            # Plain weights may lie as the caller's do, and b1 lies as they do.
            same = weights.layout.split_half == self._layout.split_half
            b1, b2 = self._biases if same else self._native_biases()
            weights = weights.with_biases(b1.contiguous(), b2.contiguous())
        return weights.with_adapters(self._native_adapters())

    def native(self, w1: Tensor, w2: Tensor) -> NativeWeights:
        """Native weights with the adapters merged, and the biases."""
        adapters = self._native_adapters()
        merged = (w1, w2) if adapters is None else adapters.merged(w1, w2)
        return (*merged, *(self._native_biases() if self._biases else (None, None)))

    def gradients(self, engine: Engine, pending: PendingWgrad) -> tuple[Tensor | None, ...]:
        """One of each input of a backward, in its dtype; None where it wants none. They are complete,
        whatever becomes of the weights'.
        """
        count = len(self._biases)
        found: list[Tensor | None] = [None] * len(self.inputs)
        with plain_ops():
            if self.trains_biases:
                db1, db2 = engine.bias_gradients(pending)
                sums = self._layout.ordered_b1(db1, pending.split_half), db2
                found[:2] = [
                    g if wanted else None for g, wanted in zip(sums, self._wanted, strict=True)
                ]
            if pending.adapters is not None and any(map(requires_grad, self.inputs[count:])):
                a, b, *of_down = pending.adapters()
                b = None if b is None else self._order_of_b.user_w1(b)
                found[count:] = [gradient for gradient in (a, b, *of_down) if gradient is not None]
            each = zip(found, self.inputs, strict=True)
            return tuple([None if g is None else g.to(given.dtype) for g, given in each])

    @property
    def _order_of_b(self) -> WeightLayout:
        return WeightLayout(
            split_half=self._layout.split_half
        )  # b is never transposed, as weights may be

    def _native_biases(self) -> tuple[Tensor, Tensor]:
        b1, b2 = self._biases
        return self._layout.native_b1(b1), b2

    def _native_adapters(self) -> Adapters | None:
        if self._adapters is None:
            return None
        with plain_ops():
            return self._adapters.native(self._order_of_b)


def named(biases: Given, adapters: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """What stands beside the weights, by name."""
    yield from zip(("b1", "b2"), biases or (), strict=False)
    yield from () if adapters is None else adapters.named
