"""Layers wide enough for several scales per row, whose tokens and gradients travel in FP8."""

from __future__ import annotations

import numpy as np
from ep_cases import Source, cases
from ep_layer import deepep_transports, poisoned_fixed_size, run_layer
from framework import IS_PADDLE

from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport

HIDDEN = 256
# Of tokens, and of gradients.
BOTH = ((True, False), (False, True), (True, True))
CASES = ("uneven", "a rank without tokens", "a rank that receives nothing", "no tokens anywhere")
PRECISION = {"dtype": "bfloat16", "fp8": True}


def sources(case):
    """The case's routing over wider tokens."""
    rng = np.random.default_rng(3)

    def wide(rows):
        return rng.standard_normal((len(rows), HIDDEN)).astype(np.float32)

    return [Source(wide(s.x), s.ids, s.weights, wide(s.x)) for s in cases(2)[case]]


def results_in_fp8(exchange, symmetric):
    """What one of two ranks sees through every dispatcher, by name."""
    rank, arrays = exchange.rank, {}
    transports = {
        "collective": CollectiveTransport(8, exchange),
        "fixed size": poisoned_fixed_size(exchange),
    }
    if not IS_PADDLE:
        transports |= deepep_transports() | symmetric
    for case in CASES:
        for form in BOTH:
            for name, transport in transports.items():
                dispatcher = Dispatcher(transport, *form)
                found = run_layer(dispatcher, sources(case)[rank], rank, **PRECISION)
                path = "/".join((name, *map(str, form), case))
                arrays |= {f"{path}/{key}": a for key, a in found.items()}
    return arrays
