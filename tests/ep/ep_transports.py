"""What the ranks of a world share: how they join it, and every transport over it."""

from __future__ import annotations

import framework
from ep_cases import EXPERTS

from sonicmoe.ep import fixed_size
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.ep.row_limit import RowLimit

MOST_TOKENS = 41  # of any rank in any case, and one more


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


def deepep_transports():
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
