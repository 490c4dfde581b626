"""Dispatchers never write into their caller's tensors, forward or backward: every transport, in a
group of one.
"""

from __future__ import annotations

import emulated_deepep
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ep_cases import EXPERTS, source
from oracle.held import SPELLINGS, spelled, untouched

from sonicmoe.ep import Dispatcher, LocalDispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.deepep import DeepEPTransport
from sonicmoe.ep.exchange_torch import TorchExchange
from sonicmoe.ep.fixed_size import FixedSizeTransport, RowLimit

TOKENS = 40
LIBRARY = emulated_deepep.LIBRARY
over = Dispatcher
DISPATCHERS = {
    "local": lambda _: LocalDispatcher(EXPERTS),
    "collective": lambda group: over(CollectiveTransport(EXPERTS, TorchExchange(group))),
    # Its rows behind the real ones are whatever was in memory.
    "fixed size": lambda group: over(FixedSizeTransport(EXPERTS, TorchExchange(group), TOKENS + 3)),
    "deepep": lambda group: over(DeepEPTransport(EXPERTS, group, LIBRARY)),
    # Its rows behind the real ones are garbage.
    "deepep worst case": lambda group: over(
        DeepEPTransport(
            EXPERTS, group, LIBRARY, limit=RowLimit(TOKENS, lambda: TorchExchange(group))
        )
    ),
}


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_dispatch_and_combine_leave_their_callers_tensors_alone(name, spelling, ids_dtype, group):
    data = source(TOKENS, 3)
    # Where nothing is sent, anything may stand.
    foreign = np.where(data.ids < 0, np.float32("nan"), data.weights)
    x, dy = (spelled(torch.from_numpy(a).to(torch.bfloat16), spelling) for a in (data.x, data.dout))
    ids = spelled(torch.from_numpy(data.ids).to(ids_dtype), spelling)
    weights = spelled(torch.from_numpy(foreign), spelling)
    mine = {"x": x, "topk_idx": ids, "topk_weights": weights, "dy": dy}
    dispatcher = DISPATCHERS[name](group)
    for differentiable in (False, True):
        x.requires_grad_(differentiable), weights.requires_grad_(differentiable)
        with untouched(**mine):
            received = dispatcher.dispatch(x, ids, weights)
            real = (received.indices >= 0).any(1, keepdim=True)
            rows = spelled(torch.where(real, received.x, 1).detach(), spelling)
            dprobs = spelled(torch.where(received.indices >= 0, 2.0, torch.nan), spelling)
            rows.requires_grad_(differentiable)
            theirs = {"indices": received.indices, "probs": received.probs, "received": received.x}
            with untouched(out=rows, dprobs=dprobs, **theirs):
                y = dispatcher.combine(rows, received.handle)
                if differentiable:
                    (drows,) = torch.autograd.grad(y, rows, dy)
                    with untouched(drows=drows):
                        delivered = [received.x, received.probs]
                        got = torch.autograd.grad(delivered, (x, weights), [drows, dprobs])
    served = (ids >= 0).any(1)
    assert torch.isfinite(y[served]).all() and y[served].any(), "sent nothing"
    for gradient in got:
        assert torch.isfinite(gradient).all() and gradient.any(), "computed nothing"
