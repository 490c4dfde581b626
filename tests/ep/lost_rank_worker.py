"""One rank of a world in which another one dies: `lost_rank_worker.py WORLD RANK DIRECTORY CALL`.

The last rank kills itself when it comes to its exchange number CALL of one layer's forward and
backward, while the others are inside that exchange or on their way to it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ep_cases import EXPERTS, source
from ep_layer import run_layer
from ep_transports import start

from sonicmoe.ep import TransportDispatcher
from sonicmoe.ep.collective import CollectiveTransport


def main(world, rank, directory, fatal):
    exchange = start(world, rank, directory)
    if rank == world - 1:
        original, calls = exchange.exchange, iter(range(10**6))

        def dying(*arguments):
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        exchange.exchange = dying
    dispatcher = TransportDispatcher(CollectiveTransport(EXPERTS, exchange))
    run_layer(dispatcher, source(12, rank), rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
