"""Worlds of ranks, each once in a run of tests; `WORLDS` has their names.

    FOLDER             every world of PyTorch's ranks, one after the other, as children of this process:
                       a world takes longer to import PyTorch than to run
    FOLDER RANK NAME   one rank of the world of that name, in an interpreter of its own. Ranks of Paddle
                       read theirs as it is imported, and some of PyTorch show that interpreters end

A world has the folder NAME in FOLDER. There are the arrays that each rank has found, and, of forked
ranks, `codes`, their exit codes, and `said`, what they have written to stderr.

The framework is the environment's SONICMOE_TEST_FRAMEWORK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import framework
import numpy as np
from ep_cases import DEEPEP, EXPERTS, IN_FP8, PRECISIONS, cases, precision_of, source
from ep_layer import MOST_TOKENS, deepep_transports, poisoned_fixed_size, run_layer, start
from forked import run_ranks
from kernels.needs import can_load_kernels

from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.fixed_size import FixedSizeTransport, RowLimit
from sonicmoe.errors import ConfigError

if not framework.IS_PADDLE:
    import symmetric_ranks
    from ep_upstream import upstream_results
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
        bound = RowLimit(12 + rank, lambda: exchange)
        transports.append(deepep_transports(bound)["deepep worst case"])
    for transport in transports:
        for _ in range(2):  # it is no better the second time
            try:
                run_layer(Dispatcher(transport), source(5, rank), rank, "bfloat16")
            except ConfigError as error:
                said.append(str(error))
    return said


def results_in_fp8(exchange, transports):
    """What travels in FP8, through every transport."""
    rank, arrays = exchange.rank, {}
    for case, *form in IN_FP8:
        for name, transport in transports.items():
            dispatcher = Dispatcher(transport, *form)
            found = run_layer(dispatcher, cases(2)[case][rank], rank, **PRECISIONS["fp8"])
            path = "/".join((name, *map(str, form), case))
            arrays |= {f"{path}/{key}": array for key, array in found.items()}
    return arrays


def results(exchange, folder):
    """Everything that this rank sees, by name. A world of two also has tokens in FP8, bounds that differ
    between ranks, a rank that exceeds the bound, and, under Paddle, reductions of `main_grad`.
    """
    world, rank = exchange.world_size, exchange.rank
    collective = CollectiveTransport(EXPERTS, exchange)
    transports = {"fixed size": poisoned_fixed_size(exchange)}
    if not framework.IS_PADDLE:
        transports |= deepep_transports(RowLimit(MOST_TOKENS, lambda: exchange))
        transports |= symmetric_ranks.transports(folder, exchange, MOST_TOKENS)
    runs = {name: (collective, options) for name, options in PRECISIONS.items()}
    for name in ("fp32", "fp8"):
        runs[f"{name} again"] = collective, PRECISIONS[name] | {"spelling": "strided"}
    found = {}
    for case, sources in cases(world).items():
        for name, transport in transports.items():
            precision = "bf16" if "deepep" in name else precision_of(case)
            runs[name] = transport, PRECISIONS[precision]
        for name, (transport, options) in runs.items():
            arrays = run_layer(Dispatcher(transport), sources[rank], rank, **options)
            found |= {f"{name}/{case}/{key}": array for key, array in arrays.items()}
    if world == 2:
        transports["collective"] = collective
        parts = {"recorded": recorded(exchange), "in fp8": results_in_fp8(exchange, transports)}
        if framework.IS_PADDLE:
            import main_grad_worker

            parts["main_grad"] = main_grad_worker.results(rank)
        else:
            parts["upstream"] = upstream_results(rank, world)
        for part, arrays in parts.items():
            found |= {f"{part}/{name}": array for name, array in arrays.items()}
        found["bounds"] = np.array(refused_bounds(exchange))
        found["exceeded"] = np.array(exceeded(exchange))
    np.savez(folder / f"{rank}.npz", **found)
    # At once: the other rank learns that this one has failed when it ends.
    os._exit(0)


def exceeded(exchange):
    """The error, in words, that this rank raises where the last rank dispatches more rows than the bound.
    That happens in the second dispatch.
    """
    rank = exchange.rank
    dispatcher = Dispatcher(FixedSizeTransport(EXPERTS, exchange, 12))
    try:
        for tokens in (12, 12 + rank):
            run_layer(dispatcher, source(tokens, rank), rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def dies(exchange, folder, fatal):
    """The last rank kills itself when it comes to its exchange number `fatal` of one layer's forward and
    backward, while the others are inside that exchange or on their way to it.
    """
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


def run_rank(name, rank, folder):
    what, world, *numbers = name.split()
    WORLDS[what](start(int(world), rank, folder), folder, *map(int, numbers))


WORLDS = {"results": results, "dies": dies}
# A name of `WORLDS`, how many ranks it has, and a number that some of them take.
FORKED = ["results 2", "results 4", "dies 4 2", "dies 2 4", "dies 2 5"]
if not framework.IS_PADDLE and can_load_kernels():
    WORLDS |= symmetric_ranks.WORLDS
    FORKED += symmetric_ranks.NAMES


def run_forked(name, folder):
    """A world as children of this process."""

    def run(rank):
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, sys.stderr.fileno())
        run_rank(name, rank, folder)

    folder.mkdir()
    (folder / "codes").write_text(json.dumps(run_ranks(int(name.split()[1]), run)))


def main(folder, rank="", name=""):
    if name:
        run_rank(name, int(rank), Path(folder))
        return
    symmetric_ranks.load_kernels(folder)
    for world in FORKED:
        run_forked(world, Path(folder) / world)


if __name__ == "__main__":
    main(*sys.argv[1:])
