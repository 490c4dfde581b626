"""One small layer on the host for the engines that quantise nothing, and how near to the reference
engine they must come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from passes import backward

from sonicmoe.engine.interface import EngineSettings, GradientMode, GradientTargets
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.layouts import WeightLayout
from sonicmoe.routing.build import build_routing
from sonicmoe.weight_source import WeightSource

BF16 = torch.bfloat16
# No tile divides these; of the experts one has two tiles, one none, and one a single row.
T, H, I, E, K = 150, 72, 40, 4, 2
SWIGLU = ActivationType.SWIGLU


@dataclass
class Case:
    """`weights` as native w1, w2, b1, b2; `layout`: an engine is given them so, where it is not None."""

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple
    settings: EngineSettings
    layout: WeightLayout | None = None

    def but(self, **settings):
        """The same operands with other settings."""
        return replace(self, settings=replace(self.settings, **settings))

    @property
    def routing(self):
        return build_routing(self.indices, self.probs, E)

    def accumulators(self):
        w1, _, b1, _ = self.weights
        return GradientTargets.zeros(E, int(w1.shape[1]), H, I, b1 is not None, "cpu")

    @property
    def source(self):
        """The weights as a user has them, each projection in one tensor."""
        w1, w2, b1, b2 = self.weights
        b1, layout = None if b1 is None else self.layout.user_b1(b1), self.layout
        return WeightSource.stacked(layout.user_w1(w1), layout.user_w2(w2), b1, b2, layout=layout)

    def forward(self, engine):
        """`(prepared weights, out, saved)`."""
        if self.layout is None:
            weights = engine.prepare_weights(*self.weights, self.settings)
        else:
            weights = engine.refresh(self.source, self.settings)
        return weights, *engine.forward(self.x, self.routing, weights, self.settings)

    def pending(self, engine):
        """The operands of the weight gradients."""
        weights, _, saved = self.forward(engine)
        return engine.backward_dx(self.dout, saved, weights)[2]


def make_case(activation=SWIGLU, *, bias=True, dtype=BF16, own=(), **settings):
    generator = torch.Generator().manual_seed(0)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator) * scale

    # Expert 0 and 2 share the tokens, 1 has none, 3 has one.
    first = torch.rand((T, 1), generator=generator) < 0.9
    second = torch.rand((T, 1), generator=generator) < 0.3
    indices = torch.cat([torch.where(first, 0, -1), torch.where(second, 2, E)], 1)
    indices[7, 1] = 3
    n1 = I * (2 if is_glu(activation) else 1)
    weights = (
        normal(E, n1, H, scale=2 * H**-0.5).to(dtype),
        normal(E, H, I, scale=I**-0.5).to(dtype),
        normal(E, n1, scale=0.3) if bias else None,
        normal(E, H, scale=0.3) if bias else None,
    )
    chosen = EngineSettings(activation, activation_parameters=own, **settings)
    probs = torch.rand((T, K), generator=generator) + 0.05
    return Case(normal(T, H).to(dtype), normal(T, H).to(dtype), indices, probs, weights, chosen)


def run(case, engine, targets=None):
    """Everything a forward and a backward give, by name; what other targets hold is not among it."""
    weights, out, saved = case.forward(engine)
    targets = targets or case.accumulators()
    dx, dprobs = backward(engine, case.dout, saved, weights, targets)
    named = {"out": out, "dx": dx, "dprobs": dprobs}
    return named | (targets.named() if targets.mode is GradientMode.NATIVE else {})
