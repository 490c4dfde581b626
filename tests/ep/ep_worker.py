"""One rank of a world: runs every case through every transport and leaves the results in
`<out>/<rank>.npz`. A world of two also has tokens in FP8, bounds that differ between ranks, and,
under Paddle, reductions of `main_grad`: a world takes longer to start than to run.

Arguments: world size, rank, directory. The framework is the environment's SONICMOE_TEST_FRAMEWORK.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fp8_worker
import framework
import numpy as np
import row_limit_worker
from ep_cases import EXPERTS, cases
from ep_layer import run_layer
from ep_transports import deepep_transports, poisoned_fixed_size, start

from sonicmoe.ep import TransportDispatcher
from sonicmoe.ep.collective import CollectiveTransport

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


def main(world, rank, directory):
    exchange = start(world, rank, directory)
    collective = TransportDispatcher(CollectiveTransport(EXPERTS, exchange))
    runs = {
        "fp32": (collective, {}),
        "again": (collective, {}),
        "bf16": (collective, {"dtype": "bfloat16"}),
    }
    fixed = TransportDispatcher(poisoned_fixed_size(exchange))
    runs["fixed fp32"], runs["fixed bf16"] = (fixed, {}), (fixed, {"dtype": "bfloat16"})
    runs["fixed fp8"] = (fixed, {"dtype": "bfloat16", "fp8": True})
    runs["fp8"] = runs["fp8 again"] = (collective, {"dtype": "bfloat16", "fp8": True})
    if not framework.IS_PADDLE:
        for name, transport in deepep_transports().items():
            runs[name] = (TransportDispatcher(transport), {"dtype": "bfloat16"})
    results = {}
    for case, sources in cases(world).items():
        for name, (dispatcher, options) in runs.items():
            for key, array in run_layer(dispatcher, sources[rank], rank, **options).items():
                results[f"{name}/{case}/{key}"] = array
    if world == 2:
        results |= {f"recorded/{name}": array for name, array in recorded(exchange).items()}
        results |= {f"in fp8/{name}": array for name, array in fp8_worker.results(exchange).items()}
        results["bounds"] = np.array(row_limit_worker.refused(exchange))
    if world == 2 and framework.IS_PADDLE:
        import main_grad_worker

        results |= {f"main_grad/{name}": a for name, a in main_grad_worker.results(rank).items()}
    np.savez(directory / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
