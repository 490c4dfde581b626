"""The arrangements that parameters come in, and where weight gradients are added."""

from __future__ import annotations

import itertools

from sonicmoe.engine.gradient_places import GradientPlaces, wgrad_destination
from sonicmoe.engine.interface import GradientMode
from sonicmoe.layouts import NATIVE, WeightLayout

LAYOUTS = [WeightLayout(t, s) for t, s in itertools.product((False, True), repeat=2)]
APART = WeightLayout(split_half=True, apart=True)


def added_to(module, sums):
    """The destination of accumulators `[E, M, N]`."""
    places = GradientPlaces.stacked(sums, len(sums), NATIVE)
    return wgrad_destination(places, module.wgrad_destination, GradientMode.NATIVE, parts=False)
