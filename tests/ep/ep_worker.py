"""One rank of a world: runs every case through every transport and leaves the results in
`<out>/<rank>.npz`.

Arguments: world size, rank, directory. The framework is the environment's SONICMOE_TEST_FRAMEWORK.
"""

from __future__ import annotations

import sys
from pathlib import Path

import framework
import numpy as np
from ep_cases import EXPERTS, cases
from ep_layer import run_layer

from sonicmoe.ep import TransportDispatcher, fixed_size
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.ep.row_limit import RowLimit

MOST_TOKENS = 41  # of any rank in any case, and one more
DEEPEP = Path(__file__).parents[1] / "data" / "deepep"
RECORDED_EXPERTS = 8


def start(world, rank, directory):
    """Join the world; returns the exchange of its ranks."""
    if framework.IS_PADDLE:
        import paddle.distributed as dist

        from sonicmoe.ep.exchange_paddle import PaddleExchange

        dist.init_parallel_env()
        return PaddleExchange()
    import torch.distributed as dist

    from sonicmoe.ep.exchange_torch import TorchExchange

    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    return TorchExchange()


def poisoned_fixed_size(exchange):
    """The transport that waits for nothing, its memory full of NaN."""

    def empty(shape, dtype, device):
        poison = float("nan") if "float" in str(dtype) else 0x7F  # which is NaN in e4m3
        return framework.torch.full(list(shape), poison, dtype=dtype, device=device)

    fixed_size.empty = empty
    return FixedSizeTransport(EXPERTS, exchange, MOST_TOKENS)


def deepep_dispatchers():
    """Every mode of the emulated library."""
    import emulated_deepep
    import torch.distributed as dist

    from sonicmoe.ep.deepep import ElasticTransport, LegacyTransport
    from sonicmoe.ep.exchange_torch import TorchExchange

    limit = RowLimit(MOST_TOKENS, TorchExchange)
    group, library = dist.group.WORLD, emulated_deepep.LIBRARY
    return {
        "legacy": LegacyTransport(EXPERTS, group, library),
        "legacy worst case": LegacyTransport(EXPERTS, group, library, limit=limit),
        "elastic": ElasticTransport(EXPERTS, group, library, max_tokens=64),
        "elastic without sync": ElasticTransport(
            EXPERTS, group, library, max_tokens=64, wait_for_counts=False
        ),
    }


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
        for name, transport in deepep_dispatchers().items():
            runs[name] = (TransportDispatcher(transport), {"dtype": "bfloat16"})
    results = {}
    for case, sources in cases(world).items():
        for name, (dispatcher, options) in runs.items():
            for key, array in run_layer(dispatcher, sources[rank], rank, **options).items():
                results[f"{name}/{case}/{key}"] = array
    if world == 2:
        results |= {f"recorded/{name}": array for name, array in recorded(exchange).items()}
    np.savez(directory / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
