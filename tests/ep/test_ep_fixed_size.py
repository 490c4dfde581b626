"""Dispatches that the host does not wait for, and those that are refused. `test_ep_worlds.py` and
`test_ep_fp8.py` have their bits, `test_ep_dispatchers.py` has the choice.
"""

from __future__ import annotations

from types import SimpleNamespace

import emulated_deepep as emulated
import pytest
import torch
from ep_cases import EXPERTS, HIDDEN, TOPK, source
from test_ep_dispatchers import Group
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from sonicmoe.ep import Dispatcher, fixed_size
from sonicmoe.ep.collective import CollectiveTransport, RowExchange
from sonicmoe.ep.deepep import DeepEPTransport
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.errors import ShapeError
from sonicmoe.quant import reference as quantiser

MOST = 9
FRAMEWORKS = ["torch", pytest.param("paddle", marks=pytest.mark.paddle)]


class Echo(RowExchange):
    """Two ranks that send the same: no process, and no value is looked at."""

    name, world_size, rank = "echo", 2, 0

    def exchange(self, rows, send_counts, recv_counts):
        assert sum(send_counts) == len(rows) and list(send_counts) == list(recv_counts)
        return rows.clone()

    def gather(self, rows):
        own, other = rows.chunk(2)
        other.copy_(own)
        return rows


def layer(dispatcher, tokens, options):
    """Forward and backward of a layer whose experts do nothing."""
    x = tokens.x.clone().requires_grad_()
    weights = tokens.weights.clone().requires_grad_()
    received = dispatcher.dispatch(x, tokens.ids, weights, **options)
    rows = received.x if received.dx_to is None else received.dx_to
    y = dispatcher.combine(rows * 1.0, received.handle)
    if received.dout_source is None:
        (y.float().sum() + received.probs.sum()).backward()
    return received


def tokens_of(count):
    data = source(count, 4)
    x, ids, weights = (torch.from_numpy(a) for a in (data.x, data.ids, data.weights))
    return SimpleNamespace(x=x.to(torch.bfloat16), ids=ids, weights=weights)


class TestNothingWaits:
    """A fake tensor has no values: whatever asks for one, or for a size that depends on them, raises."""

    OPTIONS = pytest.mark.parametrize("options", [{}, {"fp8": True, "fp8_grad": True}], ids=str)

    def run(self, transport, count, options):
        mode = FakeTensorMode()
        fakes = {name: mode.from_tensor(t) for name, t in vars(tokens_of(count)).items()}
        with mode:
            return layer(Dispatcher(transport), SimpleNamespace(**fakes), options)

    @OPTIONS
    @pytest.mark.parametrize("count", [0, 5, MOST])
    def test_from_the_second_dispatch_on(self, monkeypatch, count, options):
        # On a host the quantiser looks whether there is a NaN, on a GPU it does not.
        monkeypatch.setattr(quantiser, "_perhaps_any", lambda mask: True)
        transport = FixedSizeTransport(EXPERTS, Echo(), MOST)
        layer(Dispatcher(transport), tokens_of(count), options)
        received = self.run(transport, count, options)
        assert received.x.shape == (2 * MOST, HIDDEN) and received.tokens_per_expert is None
        assert received.indices.shape == received.probs.shape == (2 * MOST, TOPK)

    def test_the_first_compares_bounds(self):
        """And so would every wait be seen here."""
        waits = DataDependentOutputException, DynamicOutputShapeException
        collective = CollectiveTransport(EXPERTS, Echo())
        for transport in (FixedSizeTransport(EXPERTS, Echo(), MOST), collective):
            with pytest.raises(waits):
                self.run(transport, 5, {})


def test_gradients_of_rows_that_are_nobodys_are_zeros(monkeypatch):
    """Not those of other ranks' tokens, and not the NaN that was in memory."""

    def poisoned(shape, dtype, device):
        return torch.full(shape, torch.nan if dtype.is_floating_point else 5, dtype=dtype)

    monkeypatch.setattr(fixed_size, "empty", poisoned)
    tokens = tokens_of(5)
    dispatcher = Dispatcher(FixedSizeTransport(EXPERTS, Echo(), MOST))
    received = dispatcher.dispatch(tokens.x, tokens.ids, tokens.weights)
    rows = received.x.requires_grad_()
    dispatcher.combine(rows, received.handle).sum().backward()
    real = (received.indices >= 0).any(1)
    assert 0 < int(real.sum()) < 10 and received.x.isnan().any()
    assert torch.equal(rows.grad, real[:, None].expand_as(rows).to(rows.dtype))


@pytest.mark.parametrize("options", [{}, {"fp8": True}], ids=str)
def test_more_rows_than_the_bound_before_anything_is_sent(options):
    class Silent(Echo):
        exchange = gather = None

    tokens, fixed = tokens_of(MOST + 1), FixedSizeTransport(8, Silent(), MOST)
    legacy = DeepEPTransport(8, Group(), emulated.LIBRARY, limit=fixed._limit)
    wide = torch.zeros(MOST + 1, 128, dtype=torch.bfloat16)
    for transport in (fixed, legacy):
        with pytest.raises(ShapeError, match=r"x has 10 rows; .* max_tokens = 9"):
            Dispatcher(transport).dispatch(wide, tokens.ids, tokens.weights, **options)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bounds_that_differ_between_ranks(framework, world_results):
    """All ranks refuse them, and none is left behind in a collective."""
    for rank, result in enumerate(world_results(framework, 2)):
        lines = result["bounds"].tolist()
        assert len(lines) == (2 if framework == "paddle" else 4)
        others = "and the ranks 0 to 1 were given [12, 13]"
        words = f"max_tokens is {12 + rank} on rank {rank}, {others}"
        assert all(words in line for line in lines)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_others_learn_of_it_when_the_rank_ends(framework, world_results):
    waited, raised = (str(result["exceeded"]) for result in world_results(framework, 2))
    words = "x has 13 rows; this dispatcher was made for max_tokens = 12"
    assert raised == f"ShapeError: {words}"
    assert "RankLostError: rank 0 of 2 lost another rank in the dispatch over" in waited
