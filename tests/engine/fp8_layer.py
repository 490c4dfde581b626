"""One small layer for the engines that compute in FP8 on a GPU, and the memory of its gradients."""

from __future__ import annotations

from dataclasses import replace

from framework import torch

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.settings import GradientMode
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.routing.build import build_routing

E, K = 4, 3


class Case:
    """bf16 operands of one layer; one expert without tokens, and both sentinels."""

    def __init__(self, tokens, hidden, inner, *, spare_rows=0, seed=0, invalid=0.3, biased=False):
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
        self.b1 = normal(E, 2 * inner) if biased else None
        self.b2 = normal(E, hidden) if biased else None

    @property
    def unused(self):
        """Tokens without a valid slot."""
        found = torch.ones(len(self.x), dtype=torch.bool)
        found[self.routing.row_token[self.routing.row_token >= 0].long()] = False
        return found

    def accumulators(self):
        experts, n1, hidden = self.w1.shape
        return GradientTargets.zeros(experts, n1, hidden, n1 // 2, self.b1 is not None, "cpu")

    def forward(self, engine, settings, **options):
        """`(prepared weights, out, saved)`."""
        weights = engine.prepare_weights(self.w1, self.w2, self.b1, self.b2, settings)
        return weights, *engine.forward(self.x, self.routing, weights, settings, **options)

    def run(self, engine, settings, targets=None):
        """Everything that a step gives, by name; weight gradients in the native layout."""
        sums = targets or self.accumulators()
        weights, out, saved = self.forward(engine, settings)
        dx, dprobs, pending = engine.backward_dx(self.dout, saved, weights)
        engine.backward_dw(pending, sums)
        found = {"out": out, "dx": dx, "dprobs": dprobs}
        found |= {name: sums.sums(name) for name in ("dw1", "dw2")}
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
    sizes,
    layout,
    *,
    stacked=False,
    frozen=(),
    fill=0.0,
    mode=GradientMode.MAIN_GRAD,
    dtype=torch.float32,
):
    """Memory of both projections as their parameters lie, all of one value; sizes: E, N1, H, I.
    Experts of `frozen` have none.
    """
    experts, *axes = sizes
    made = []
    for native in (axes[:2], axes[1:]):
        shape = native[::-1] if layout.transposed else native
        if stacked:
            sizes = (experts, *shape)
            if layout.apart and not made:
                sizes = (2, experts, shape[0] // 2, shape[1])
            tensor = torch.full(sizes, fill, dtype=dtype)
            made.append(GradientPlaces.stacked(tensor, experts, layout))
        else:
            each = [torch.full(tuple(shape), fill, dtype=dtype) for _ in range(experts)]
            held = [None if e in frozen else tensor for e, tensor in enumerate(each)]
            made.append(GradientPlaces.per_expert(held, layout))
    return GradientTargets(*made, mode)


def assert_same_bits(found, wanted):
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
