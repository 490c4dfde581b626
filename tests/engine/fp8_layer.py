"""One small layer in bf16 for the engines of a GPU over kernels of a host, and the memory of its gradients."""

from __future__ import annotations

from dataclasses import replace

from framework import torch

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import GradientMode
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.layouts import NATIVE
from sonicmoe.routing.build import build_routing
from sonicmoe.weight_source import WeightSource

E, K = 4, 3
PLAIN = EngineSettings()


class Case:
    """Operands; one expert has no tokens, and both sentinels occur. biased: in fp32. layout: the weights
    are a user's, who has each projection in one tensor; native ones otherwise.
    """

    def __init__(
        self, tokens, hidden, inner, *, spare_rows=0, seed=0, invalid=0.3, biased=False, layout=None
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size, scale=1.0):
            return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)

        self.x, self.dout = normal(tokens, hidden), normal(tokens, hidden)
        self.w1 = normal(E, 2 * inner, hidden, scale=hidden**-0.5)
        self.w2 = normal(E, hidden, inner, scale=inner**-0.5)
        ids = torch.rand(tokens, E - 1, generator=generator).argsort(1)[:, :K]
        drop = torch.rand(tokens, K, generator=generator) < invalid
        sentinel = torch.where(torch.rand(tokens, K, generator=generator) < 0.5, -1, E)
        probs = torch.rand(tokens, K, generator=generator) + 0.05
        routing = build_routing(torch.where(drop, sentinel, ids), probs, E)
        self.routing = with_spare_rows(routing, spare_rows)
        self.b1 = normal(E, 2 * inner).float() if biased else None
        self.b2 = normal(E, hidden).float() if biased else None
        self.layout = layout

    @property
    def sizes(self):
        return *self.w1.shape, self.w2.shape[2]

    @property
    def source(self):
        """The weights as a user has them."""
        layout = self.layout or NATIVE
        b1 = None if self.b1 is None else layout.user_b1(self.b1)
        user = layout.user_w1(self.w1), layout.user_w2(self.w2), b1, self.b2
        return WeightSource.stacked(*user, layout=layout)

    def accumulators(self):
        return GradientTargets.zeros(*self.sizes, self.b1 is not None, "cpu")

    def targets(self, layout, **options):
        """Memory for gradients of the weights as `parameter_targets` makes it."""
        return parameter_targets(self.sizes, layout, **options)

    def forward(self, engine, settings=PLAIN, source=None, **options):
        """`(prepared weights, out, saved)`; source: read in place of the case's own weights."""
        if source or self.layout:
            weights = engine.refresh(source or self.source, settings)
        else:
            weights = engine.prepare_weights(self.w1, self.w2, self.b1, self.b2, settings)
        return weights, *engine.forward(self.x, self.routing, weights, settings, **options)

    def pending(self, engine, settings=PLAIN):
        """The operands of the weight gradients."""
        weights, _, saved = self.forward(engine, settings)
        return engine.backward_dx(self.dout, saved, weights)[2]

    def run(self, engine, settings=PLAIN, targets=None, source=None):
        """Everything that a step gives, by name; weight gradients in the native layout."""
        sums = targets or self.accumulators()
        weights, out, saved = self.forward(engine, settings, source)
        dx, dprobs, pending = engine.backward_dx(self.dout, saved, weights)
        engine.backward_dw(pending, sums)
        found = {"out": out, "dx": dx, "dprobs": dprobs} | sums_of(sums)
        if self.b1 is not None:
            found |= {name: sums.named()[name] for name in ("db1", "db2")}
        return found


def with_spare_rows(routing, count):
    """As a builder leaves it that does not know the counts on the host: padding rows behind
    everybody's.
    """
    longer = {
        name: torch.cat([rows, torch.full((count,), fill, dtype=rows.dtype)], 0)
        for name, rows, fill in (
            ("row_token", routing.row_token, -1),
            ("row_prob", routing.row_prob, 0.0),
        )
    }
    return replace(routing, num_rows=routing.num_rows + count, **longer)


def parameter_targets(
    sizes, layout, *, stacked=False, turned=False, frozen=(), fill=0.0, mode=GradientMode.MAIN_GRAD, dtype=torch.float32
):  # fmt: skip
    """Memory of both projections as their parameters lie, all of one value; sizes: E, N1, H, I. stacked:
    a tensor of all experts. turned: its matrices are contiguous along their other axis. Without it,
    experts of `frozen` have none.
    """
    experts, *axes = sizes
    made = []
    for native in (axes[:2], axes[1:]):
        shape = native[::-1] if layout.transposed else native
        if stacked or turned:
            sizes = (experts, *(shape[::-1] if turned else shape))
            if layout.apart and not made:
                sizes = (2, experts, shape[0] // 2, shape[1])
            tensor = torch.full(sizes, fill, dtype=dtype)
            tensor = tensor.transpose(1, 2) if turned else tensor
            made.append(GradientPlaces.stacked(tensor, experts, layout))
        else:
            each = [torch.full(tuple(shape), fill, dtype=dtype) for _ in range(experts)]
            held = [None if e in frozen else tensor for e, tensor in enumerate(each)]
            made.append(GradientPlaces.per_expert(held, layout))
    return GradientTargets(*made, mode)


def sums_of(targets):
    """What the memory of both weights' gradients holds, by name, in the native layout."""
    return {name: targets.sums(name) for name in ("dw1", "dw2")}


def assert_same_bits(found, wanted):
    """Of what was found, which may be a part of a step."""
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
