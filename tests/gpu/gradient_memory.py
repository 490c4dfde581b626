"""Gradient memory of one layer within larger allocations of known bytes, in every arrangement that
parameters come in; and what it must hold after additions.
"""

from __future__ import annotations

import itertools

import torch
from gpu.device import raw

from sonicmoe.engine.gradient_places import GradientPlaces, wgrad_destination
from sonicmoe.engine.interface import GradientMode, GradientTargets
from sonicmoe.layouts import NATIVE, WeightLayout

LAYOUTS = [WeightLayout(t, s) for t, s in itertools.product((False, True), repeat=2)]
APART = WeightLayout(split_half=True, apart=True)


def name_of(layout):
    """`HN-halves`, for the id of a test."""
    order = "HN" if layout.transposed else "NH"
    rows = "two" if layout.apart else "halves" if layout.split_half else "turns"
    return f"{order}-{rows}"


def ids(value):
    """Of the parameters of a test."""
    return name_of(value) if isinstance(value, WeightLayout) else str(value)


class Memory:
    """sizes: E, N1, H, I. arrangement: a method below."""

    def __init__(self, sizes, layout, arrangement, dtype=torch.float32):
        experts, n1, hidden, inner = sizes
        self.layout, self.allocations, self.dtype = layout, [], dtype
        matrices = ((n1, hidden), (hidden, inner))
        matrices = [size[::-1] if layout.transposed else size for size in matrices]
        self.targets = GradientTargets(*getattr(self, arrangement)(matrices, experts))
        self.wanted = [memory.clone() for memory in self.allocations]

    def allocate(self, *shape):
        generator = torch.Generator("cuda").manual_seed(len(self.allocations))
        values = torch.randn(shape, generator=generator, device="cuda")
        self.allocations.append(values.to(self.dtype))
        return self.allocations[-1]

    # ---- a tensor for every expert ----

    def own(self, sizes, experts):
        """Strangers before and behind it."""
        return [
            GradientPlaces.per_expert(
                [self.allocate(m * n + 64)[40:-24].view(m, n) for _ in range(experts)], self.layout
            )
            for m, n in sizes
        ]

    def slices(self, sizes, experts):
        """Equally far apart in one communication buffer, up and down of an expert side by side."""
        width = sum(m * n + 8 for m, n in sizes)
        buffer, targets, start = self.allocate(experts, width), [], 0
        for m, n in sizes:
            parts = [row[start : start + m * n].view(m, n) for row in buffer]
            targets.append(GradientPlaces.per_expert(parts, self.layout))
            start += m * n + 8
        return targets

    def some_frozen(self, sizes, experts):
        """As `own`, but for parameters of every third expert."""
        up, down = self.own(sizes, experts)
        kept = [[t if e % 3 else None for e, t in enumerate(w.tensors)] for w in (up, down)]
        return [GradientPlaces.per_expert(tensors, self.layout) for tensors in kept]

    # ---- one tensor of all experts ----

    def stacked_slices(self, sizes, experts):
        """Equally far apart in a communication buffer that holds other gradients too."""
        return [
            GradientPlaces.stacked(
                self.allocate(experts, m * n + 16)[:, 8:-8].unflatten(1, (m, n)),
                experts,
                self.layout,
            )
            for m, n in sizes
        ]

    def experts_inside_permuted(self, sizes, experts):
        """The axes in another order of memory, rows and matrices padded."""
        return [
            GradientPlaces.stacked(
                self.allocate(n, experts, m + 8)[:, :, :-8].permute(1, 2, 0), experts, self.layout
            )
            for m, n in sizes
        ]

    # ---- what it must hold ----

    def check(self):
        """Every byte of every allocation."""
        for index, (memory, wanted) in enumerate(zip(self.allocations, self.wanted, strict=True)):
            differ = int((raw(memory) != raw(wanted)).sum())
            assert differ == 0, f"allocation {index} {tuple(memory.shape)}: {differ} bytes differ"

    def take(self, dw1, dw2, over=False):
        """Assert that native gradients were added where they belong, as a flush adds them; `over`: that they
        were written there.
        """
        held = [memory.clone() for memory in self.allocations]
        for memory, wanted in zip(self.allocations, self.wanted, strict=True):
            memory.copy_(wanted)
        for name, gradient in (("dw1", dw1), ("dw2", dw2)):
            target = self.targets.up if name == "dw1" else self.targets.down
            for expert, matrix in enumerate(gradient):
                arranged, place = self.targets.arranged(name, matrix), target.matrix(expert)
                if over and place is not None:
                    place.copy_(arranged)
                elif not over:
                    self.targets.add(name, expert, arranged)
        self.wanted = [memory.clone() for memory in self.allocations]
        for memory, now in zip(self.allocations, held, strict=True):
            memory.copy_(now)
        self.check()


def added_to(module, sums):
    """The destination of accumulators `[E, M, N]`."""
    places = GradientPlaces.stacked(sums, len(sums), NATIVE)
    return wgrad_destination(places, module.wgrad_destination, GradientMode.NATIVE, parts=False)
