"""The biases of the experts of one call of a node. They are inputs of its autograd node, as tokens are,
so that autograd adds their gradients wherever they came from: weights alone have `main_grad`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..engine.interface import EngineWeights, GradientTargets, NativeBuffer, ParameterTargets
from ..errors import ConfigError, expect
from ..interop import require_framework_tensor, requires_grad
from ..layouts import WeightLayout
from ..refusals import need_shape
from ..weights.parameters import ExpertParameters

Tensor = torch.Tensor


class Biases(NamedTuple):
    """b1 `[E, N1]` and b2 `[E, H]` in fp32; b1 has the order of the rows of w1 in `layout`."""

    b1: Tensor
    b2: Tensor
    layout: WeightLayout
    dtypes: tuple[torch.dtype, torch.dtype]

    @classmethod
    def of(
        cls, given: tuple[Tensor, Tensor], layer: ExpertParameters, frozen: bool, puts_off: bool
    ) -> Biases:
        """Of the caller's tensors, which may be part of a graph. `frozen`: no weight trains; `puts_off`:
        weight gradients may be complete after their backward only.
        """
        (experts, n1, hidden), _ = layer.native_shapes()
        for name, bias, width in zip(("b1", "b2"), given, (n1, hidden), strict=True):
            require_framework_tensor(bias, name)
            need_shape(tuple(bias.shape) == (experts, width), name, bias, (experts, width))
        trained = any(map(requires_grad, given))
        because = "the gradients of biases are summed with those of the weights"
        words = f"the experts' biases train and none of their weights does, and {because}"
        expect(not (frozen and trained), ConfigError, f"{words}; needed: a weight that trains")
        words = "biases came to a node that puts off weight gradients (split_wgrad, a schedule)"
        needed = "a node that puts off none"
        expect(not puts_off, ConfigError, f"{words}, and {because}; needed: {needed}")
        b1, b2 = (bias.detach().to(torch.float32) for bias in given)
        return cls(b1, b2, layer.layout, (given[0].dtype, given[1].dtype))

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
