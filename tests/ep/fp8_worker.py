"""One of two ranks: a layer whose tokens or gradients travel in FP8, through every dispatcher."""

from __future__ import annotations

import framework
import numpy as np
from ep_fp8 import BOTH, CASES, run_fp8, sources
from ep_transports import deepep_transports, poisoned_fixed_size

from sonicmoe.ep import TransportDispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.errors import ConfigError


def results(exchange):
    """Arrays by name, and what an ElasticBuffer refuses."""
    rank = exchange.rank
    transports = {
        "collective": CollectiveTransport(8, exchange),
        "fixed size": poisoned_fixed_size(exchange),
    }
    refused = ""
    if not framework.IS_PADDLE:
        made = deepep_transports()
        transports |= {name: made[name] for name in ("legacy", "legacy worst case")}
        source = sources("uneven")[rank]
        try:
            run_fp8(TransportDispatcher(made["elastic"]), source, rank, True)
        except ConfigError as error:
            refused = str(error)
        try:
            run_fp8(TransportDispatcher(made["elastic"]), source, rank, False, grads=True)
        except ConfigError as error:
            refused += str(error)
    arrays = {"refused": np.array(refused)}
    for case in CASES:
        for form, grads in BOTH:
            for name, transport in transports.items():
                dispatcher = TransportDispatcher(transport, form, grads)
                found = run_fp8(dispatcher, sources(case)[rank], rank, form, grads=grads)
                arrays |= {f"{name}/{form}/{grads}/{case}/{key}": a for key, a in found.items()}
    return arrays
