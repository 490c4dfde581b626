"""One of two ranks: a layer whose tokens or gradients travel in FP8, through every dispatcher. Results to
`<out>/<rank>.npz`.

Arguments: rank, directory. The framework is the environment's SONICMOE_TEST_FRAMEWORK.
"""

from __future__ import annotations

import sys
from pathlib import Path

import framework
import numpy as np
from ep_fp8 import BOTH, CASES, run_fp8, sources
from ep_worker import deepep_dispatchers, poisoned_fixed_size, start

from sonicmoe.ep import TransportDispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.errors import ConfigError


def main(rank, directory):
    exchange = start(2, rank, directory)
    transports = {
        "collective": CollectiveTransport(8, exchange),
        "fixed size": poisoned_fixed_size(exchange),
    }
    refused = ""
    if not framework.IS_PADDLE:
        made = deepep_dispatchers()
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
    results = {"refused": np.array(refused)}
    for case in CASES:
        for form, grads in BOTH:
            for name, transport in transports.items():
                dispatcher = TransportDispatcher(transport, form, grads)
                found = run_fp8(dispatcher, sources(case)[rank], rank, form, grads=grads)
                results |= {f"{name}/{form}/{grads}/{case}/{key}": a for key, a in found.items()}
    np.savez(directory / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
