"""Dispatchers never write into their caller's tensors, forward or backward: every transport, in a
group of one.
"""

from __future__ import annotations

import emulated_deepep
import numpy as np
import pytest
import torch
import torch.distributed as dist
from callers_tensors import SPELLINGS, spelled, untouched
from ep_cases import EXPERTS, source

from sonicmoe.ep import LocalDispatcher, TransportDispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.deepep import ElasticTransport, LegacyTransport
from sonicmoe.ep.exchange_torch import TorchExchange
from sonicmoe.ep.fixed_size import FixedSizeTransport

TOKENS = 40


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def collective(group):
    return TransportDispatcher(CollectiveTransport(EXPERTS, TorchExchange(group)))


def fixed_size(group):
    """Its rows behind the real ones are whatever was in memory."""
    return TransportDispatcher(FixedSizeTransport(EXPERTS, TorchExchange(group), TOKENS + 3))


def legacy(group):
    return TransportDispatcher(LegacyTransport(EXPERTS, group, emulated_deepep.LIBRARY))


def elastic(group):
    """Its rows behind the real ones are garbage."""
    library, options = emulated_deepep.LIBRARY, {"max_tokens": TOKENS, "wait_for_counts": False}
    return TransportDispatcher(ElasticTransport(EXPERTS, group, library, **options))


def local(_):
    return LocalDispatcher(EXPERTS)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "make", [local, collective, fixed_size, legacy, elastic], ids=lambda make: make.__name__
)
def test_dispatch_and_combine_leave_their_callers_tensors_alone(make, spelling, ids_dtype, group):
    data = source(TOKENS, 3)
    foreign = np.where(
        data.ids < 0, np.float32("nan"), data.weights
    )  # where nothing is sent, anything may stand
    x, dy = (spelled(torch.from_numpy(a).to(torch.bfloat16), spelling) for a in (data.x, data.dout))
    ids = spelled(torch.from_numpy(data.ids).to(ids_dtype), spelling)
    weights = spelled(torch.from_numpy(foreign), spelling)
    dispatcher, mine = make(group), {"x": x, "topk_idx": ids, "topk_weights": weights, "dy": dy}
    for differentiable in (False, True):
        x.requires_grad_(differentiable), weights.requires_grad_(differentiable)
        with untouched(**mine):
            received = dispatcher.dispatch(x, ids, weights)
            rows = spelled(
                torch.where((received.indices >= 0).any(1, keepdim=True), received.x, 1).detach(),
                spelling,
            )
            dprobs = spelled(torch.where(received.indices >= 0, 2.0, torch.nan), spelling)
            rows.requires_grad_(differentiable)
            theirs = {
                "indices": received.indices,
                "probs": received.probs,
                "received x": received.x,
            }
            with untouched(out=rows, dprobs=dprobs, **theirs):
                y = dispatcher.combine(rows, received.handle)
                if differentiable:
                    (drows,) = torch.autograd.grad(y, rows, dy)
                    with untouched(drows=drows):
                        got = torch.autograd.grad(
                            [received.x, received.probs], (x, weights), [drows, dprobs]
                        )
    served = (ids >= 0).any(1)
    assert torch.isfinite(y[served]).all() and y[served].any(), "sent nothing"
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in got), (
        "computed nothing"
    )
