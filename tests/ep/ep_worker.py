"""One rank of a world, or with `all` in the place of RANK every rank, as a child of this process.

    WORLD RANK DIRECTORY             every case through every transport; `<out>/<rank>.npz`. A world of
                                     two also has tokens in FP8, bounds that differ between ranks, a
                                     rank that exceeds the bound, and, under Paddle, reductions of
                                     `main_grad`: a world takes longer to start than to run
    WORLD RANK DIRECTORY dies CALL   the last rank kills itself when it comes to its exchange number
                                     CALL of one layer's forward and backward, while the others are
                                     inside that exchange or on their way to it; `all` prints the
                                     exit codes

The framework is the environment's SONICMOE_TEST_FRAMEWORK. Ranks of Paddle read theirs as it is
imported, so each has an interpreter of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import framework
import numpy as np
from ep_cases import EXPERTS, FORMS, OF_FP8, PRECISIONS, cases, precision_of, source
from ep_layer import MOST_TOKENS, deepep_transports, poisoned_fixed_size, run_layer, start
from forked import run_ranks
from kernels.needs import can_load_kernels

from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.fixed_size import FixedSizeTransport, RowLimit
from sonicmoe.errors import ConfigError

DEEPEP = Path(__file__).parents[1] / "data" / "deepep"
RECORDED_EXPERTS = 8


def recorded(exchange):
    """The collective transport on the inputs of a recorded DeepEP dispatch."""
    with np.load(DEEPEP / f"dispatched_rank{exchange.rank}.npz") as data:
        bits = data["x"].view(np.uint16).astype(np.uint32) << 16
        x = framework.tensor(bits.view(np.float32)).to(framework.torch.bfloat16)
        ids, weights = framework.tensor(data["topk_idx"]), framework.tensor(data["topk_weights"])
    received = CollectiveTransport(RECORDED_EXPERTS, exchange).dispatch(x, ids, weights)
    arrays = {"x": received.x, "idx": received.topk_idx, "weights": received.topk_weights}
    return {name: framework.numpy(array) for name, array in arrays.items()} | {
        "counts": received.tokens_per_expert
    }


def refused_bounds(exchange):
    """What every dispatch of this rank raises, where each rank was given another `max_tokens`: of
    both transports that compare them.
    """
    rank, said = exchange.rank, []
    transports = [FixedSizeTransport(EXPERTS, exchange, 12 + rank)]
    if not framework.IS_PADDLE:
        import emulated_deepep
        import torch.distributed as dist

        from sonicmoe.ep.deepep import DeepEPTransport

        limit = RowLimit(12 + rank, lambda: exchange)
        given = EXPERTS, dist.group.WORLD, emulated_deepep.LIBRARY
        transports.append(DeepEPTransport(*given, limit=limit))
    for transport in transports:
        for _ in range(2):  # it is no better the second time
            try:
                run_layer(Dispatcher(transport), source(5, rank), rank, "bfloat16")
            except ConfigError as error:
                said.append(str(error))
    return said


def results_in_fp8(exchange, symmetric):
    """What travels in FP8, through every transport."""
    transports = {
        "collective": CollectiveTransport(EXPERTS, exchange),
        "fixed size": poisoned_fixed_size(exchange),
    }
    if not framework.IS_PADDLE:
        transports |= deepep_transports() | symmetric
    rank, arrays = exchange.rank, {}
    for case in OF_FP8:
        for form in FORMS:
            for name, transport in transports.items():
                dispatcher = Dispatcher(transport, *form)
                found = run_layer(dispatcher, cases(2)[case][rank], rank, **PRECISIONS["fp8"])
                path = "/".join((name, *map(str, form), case))
                arrays |= {f"{path}/{key}": array for key, array in found.items()}
    return arrays


def results(exchange, directory):
    """Everything that this rank sees, by name."""
    world, rank = exchange.world_size, exchange.rank
    collective = Dispatcher(CollectiveTransport(EXPERTS, exchange))
    fixed = Dispatcher(poisoned_fixed_size(exchange))
    runs = {name: (collective, options) for name, options in PRECISIONS.items()}
    for name, again in (("fp32", "again"), ("fp8", "fp8 again")):
        runs[again] = collective, PRECISIONS[name] | {"spelling": "strided"}
    if not framework.IS_PADDLE:
        for name, transport in deepep_transports().items():
            runs[name] = Dispatcher(transport), {"dtype": "bfloat16"}
    symmetric = peers_of(exchange, directory)
    found = {}
    for case, sources in cases(world).items():
        for name, dispatcher in {"fixed": fixed, **symmetric}.items():
            runs[name] = dispatcher, PRECISIONS[precision_of(case)]
        for name, (dispatcher, options) in runs.items():
            for key, array in run_layer(dispatcher, sources[rank], rank, **options).items():
                found[f"{name}/{case}/{key}"] = array
    if world == 2:
        found |= {f"recorded/{name}": array for name, array in recorded(exchange).items()}
        transports = {name: dispatcher.transport for name, dispatcher in symmetric.items()}
        named = results_in_fp8(exchange, transports)
        found |= {f"in fp8/{name}": array for name, array in named.items()}
        found["bounds"] = np.array(refused_bounds(exchange))
    if world == 2 and not framework.IS_PADDLE:
        from ep_upstream import upstream_results

        named = upstream_results(rank, world)
        found |= {f"upstream/{name}": array for name, array in named.items()}
    if world == 2 and framework.IS_PADDLE:
        import main_grad_worker

        found |= {f"main_grad/{name}": a for name, a in main_grad_worker.results(rank).items()}
    return found


def peers_of(exchange, directory):
    """Dispatchers over emulated symmetric memory, where its kernels can be compiled."""
    if framework.IS_PADDLE or not can_load_kernels():
        return {}
    import emulated_peers

    module = emulated_peers.kernels(Path(directory).parent)
    made = emulated_peers.transports(directory, exchange, MOST_TOKENS, module)
    return {name: Dispatcher(transport) for name, transport in made.items()}


def dies(exchange, fatal):
    world, rank = exchange.world_size, exchange.rank
    if rank == world - 1:
        original, calls = exchange.exchange, iter(range(10**6))

        def dying(*arguments):
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        exchange.exchange = dying
    dispatcher = Dispatcher(CollectiveTransport(EXPERTS, exchange))
    run_layer(dispatcher, source(12, rank), rank)


def exceeded(exchange):
    """What this rank raises where the last one dispatches more rows than the bound, in its second
    dispatch.
    """
    rank = exchange.rank
    dispatcher = Dispatcher(FixedSizeTransport(EXPERTS, exchange, 12))
    try:
        for tokens in (12, 12 + rank):
            run_layer(dispatcher, source(tokens, rank), rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(world, rank, directory, what="", fatal=""):
    if rank == "all":
        given = directory, what, fatal
        codes = run_ranks(int(world), lambda number: main(world, str(number), *given))
        print(codes)
        sys.exit(any(codes) and not what)
    exchange = start(int(world), int(rank), directory)
    if what == "dies":
        dies(exchange, int(fatal))
        return
    found = results(exchange, directory)
    if world == "2":
        found["exceeded"] = np.array(exceeded(exchange))
    np.savez(Path(directory) / f"{rank}.npz", **found)
    # At once: the other rank learns that this one has failed when it ends.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
