"""The biases of the experts of one call of a node. They are inputs of its autograd node, as tokens are,
so that autograd adds their gradients wherever they came from: weights alone have `main_grad`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..engine.interface import EngineWeights, GradientTargets, NativeBuffer, ParameterTargets
from ..errors import ConfigError, expect
from ..interop import requires_grad
from ..layouts import WeightLayout

Tensor = torch.Tensor


class Biases(NamedTuple):
    """b1 `[E, N1]` and b2 `[E, H]` in fp32; b1 has the order of the rows of w1 in `layout`."""

    b1: Tensor
    b2: Tensor
    layout: WeightLayout
    dtypes: tuple[torch.dtype, torch.dtype]

    @classmethod
    def of(cls, given: tuple[Tensor, Tensor], layout: WeightLayout, frozen: bool) -> Biases:
        """Of the caller's tensors, which may be part of a graph; `frozen`: no weight trains."""
        expect(
            not (frozen and any(map(requires_grad, given))),
            ConfigError,
            "the experts' biases train and none of their weights does; needed: a weight that "
            "trains, because the gradients of biases are summed with those of the weights",
        )
        b1, b2 = (bias.detach().to(torch.float32) for bias in given)
        return cls(b1, b2, layout, (given[0].dtype, given[1].dtype))

    def native(self) -> tuple[Tensor, Tensor]:
        """In the native order."""
        return self.layout.native_b1(self.b1), self.b2

    def beside(self, weights: EngineWeights) -> EngineWeights:
        """The engine's weights with these biases."""
        # Plain weights may lie as the caller's do, and b1 lies as they do.
        same = weights.layout.split_half == self.layout.split_half
        b1, b2 = (self.b1, self.b2) if same else self.native()
        return replace(weights, b1=b1.contiguous(), b2=b2.contiguous())

    def expect_gradients(self, targets: GradientTargets) -> None:
        """Have an engine that adds to `targets` sum the gradients of biases beside them."""
        sums = torch.zeros_like(self.b1), torch.zeros_like(self.b2)
        if isinstance(targets, NativeBuffer):
            targets.db1, targets.db2 = sums
        else:
            assert isinstance(targets, ParameterTargets)
            targets.biases = sums

    def take_gradients(self, targets: GradientTargets) -> tuple[Tensor, Tensor]:
        """Those sums, each as its bias is. `targets` forget them."""
        if isinstance(targets, NativeBuffer):
            db1, db2 = targets.db1, targets.db2
            targets.db1 = targets.db2 = None
            assert db1 is not None and db2 is not None
            db1 = self.layout.user_b1(db1)
        else:
            assert isinstance(targets, ParameterTargets) and targets.biases is not None
            (db1, db2), targets.biases = targets.biases, None
            assert db1 is not None and db2 is not None
        return db1.to(self.dtypes[0]), db2.to(self.dtypes[1])
