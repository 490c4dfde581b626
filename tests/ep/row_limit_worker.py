"""Two ranks that disagree about `max_tokens`.

`refused`: each rank was given another one; both transports that compare them do. As a program,
`row_limit_worker.py RANK DIRECTORY`: the last rank dispatches more rows than the bound, in its
second dispatch, and ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import framework
from ep_cases import EXPERTS, source
from ep_layer import run_layer
from ep_transports import start

from sonicmoe.ep import TransportDispatcher
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.ep.row_limit import RowLimit
from sonicmoe.errors import ConfigError


def refused(exchange):
    """What every dispatch of this rank raises."""
    rank, said = exchange.rank, []
    transports = [FixedSizeTransport(EXPERTS, exchange, 12 + rank)]
    if not framework.IS_PADDLE:
        import emulated_deepep
        import torch.distributed as dist

        from sonicmoe.ep.deepep import LegacyTransport

        limit = RowLimit(12 + rank, lambda: exchange)
        library = emulated_deepep.LIBRARY
        transports.append(LegacyTransport(EXPERTS, dist.group.WORLD, library, limit=limit))
    for transport in transports:
        for _ in range(2):  # it is no better the second time
            try:
                run_layer(TransportDispatcher(transport), source(5, rank), rank, "bfloat16")
            except ConfigError as error:
                said.append(str(error))
    return said


def main(rank, directory):
    exchange = start(2, rank, directory)
    dispatcher = TransportDispatcher(FixedSizeTransport(EXPERTS, exchange, 12))
    for tokens in (12, 12 + rank):
        run_layer(dispatcher, source(tokens, rank), rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
