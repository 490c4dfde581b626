"""Dispatchers in one process: which transport is chosen, finding the library, and gradients that no
library may change.
"""

from __future__ import annotations

import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import emulated_deepep as emulated
import pytest
import torch
import torch.distributed as dist
from ep_cases import EXPERTS, source
from torch.autograd import forward_ad

from sonicmoe.ep import Dispatcher, LocalDispatcher, make_dispatcher, peer_memory, select
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.deepep import DeepEPTransport, find_library
from sonicmoe.ep.dispatcher import LocalTransport
from sonicmoe.ep.exchange_torch import TorchExchange, is_gpu_group
from sonicmoe.ep.fixed_size import FixedSizeTransport, RowLimit
from sonicmoe.ep.symmetric import SymmetricTransport
from sonicmoe.errors import ConfigError, EngineUnavailableError, RankLostError, ShapeError


class Group:
    """What a transport asks of a process group."""

    def __init__(self, size=2):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return 0


def test_buffer_grows_with_the_rows_and_is_kept_otherwise():
    made = []

    class Buffer(emulated.Buffer):
        def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
            made.append(num_nvl_bytes)

        def dispatch(self, x, handle=None):
            return (x,)

    transport = DeepEPTransport(8, Group(), SimpleNamespace(Buffer=Buffer))
    for hidden in (64, 64, 32, 128):
        transport.dispatch_cached(torch.zeros(1, hidden, dtype=torch.bfloat16), "handle")
    assert made == [256, 512]


@pytest.fixture
def unnamed_group():
    """A group of one that was made without naming a backend, and a sub-group."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD, dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("serves", "gpu"),
    [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False), ("cpu:gloo,cuda:gloo", False)],
)  # fmt: skip
def test_a_group_is_judged_by_the_devices_it_serves(unnamed_group, serves, gpu, monkeypatch):
    for group in unnamed_group:
        assert dist.get_backend(group) == "undefined"
        monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, serves)
        assert is_gpu_group(group) == gpu
        assert TorchExchange(group).name == f"torch.distributed ({serves})"
        monkeypatch.undo()


class Exchange:
    """What a collective transport asks of its exchange."""

    def __init__(self, group):
        self.name, self.world_size, self.rank = "exchange", group.size(), group.rank()


class WithoutNvshmem(emulated.Buffer):
    """As a build without NVSHMEM offers it."""

    def __init__(self, group, *sizes):
        self.sizes = sizes

    class Config(emulated.Config):
        def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
            why = "'NVSHMEM is disable during compilation'"
            raise RuntimeError(f"Failed: Assertion error buffer.cu:1 {why}\nat")

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks != 3, "Unsupported number of EP ranks: 3"
        return WithoutNvshmem.Config()

    get_combine_config = get_dispatch_config


class OfPaddle(emulated.Buffer):
    """Of Paddle's build, which knows no worst case."""

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None):
        raise AssertionError("nothing is sent here")


EXPERTS_OF_ALL = 48
DEEPEP = SimpleNamespace(Buffer=emulated.Buffer)
SMALL, PADDLES = SimpleNamespace(Buffer=WithoutNvshmem), SimpleNamespace(Buffer=OfPaddle)
BLIND = {"wait_for_counts": False, "max_tokens": 9}
APART = "no symmetric memory: the ranks are on 2 hosts"
CANNOT = "Buffer cannot serve"
NO_NVSHMEM = f"{CANNOT} 16 ranks: Failed: .*NVSHMEM is disable during compilation"
ODD = f"{CANNOT} 3 ranks: Unsupported number of EP ranks: 3"
FAR = f"{CANNOT} 16 ranks with wait_for_counts=False: it can within one NVLink domain, of 8 ranks"
NO_WORST = f"{CANNOT} 2 ranks with wait_for_counts=False: its dispatch takes no num_worst_tokens"


@pytest.fixture
def world(monkeypatch):
    """`world(ranks, library, ...)`: a group for which the choice is made."""

    def made(ranks=2, library=DEEPEP, gpu=True, maps=False):
        monkeypatch.setattr(select, "is_gpu_group", lambda group: gpu)
        problem = "" if maps else "the ranks are on 2 hosts"
        monkeypatch.setattr(select, "peers_problem", lambda group: problem)
        found = (None, "not built") if library is None else (library, "")
        monkeypatch.setattr(select, "find_library", lambda: found)
        monkeypatch.setattr(select, "GroupExchange", Exchange)
        return Group(ranks)

    return made


NEAR = {"maps": True}
CHOICES = [
    ({"gpu": False, **NEAR}, {}, CollectiveTransport, "the group has no NCCL, so no GPUs"),
    ({"gpu": False}, BLIND, FixedSizeTransport, "; without waiting for counts: room for 9 tokens of every rank"),
    (NEAR, {}, SymmetricTransport, "the ranks map each other's memory"),
    ({"library": None}, {}, CollectiveTransport, f"no DeepEP: not built; {APART}"),
    ({}, {}, DeepEPTransport, f"DeepEP is installed; {APART}"),
    *((NEAR, {"kind": kind}, transport, "as asked for") for kind, transport in (
        ("symmetric", SymmetricTransport), ("deepep", DeepEPTransport), ("collective", CollectiveTransport))),
    ({}, BLIND, DeepEPTransport, "room for 9 tokens"),
    # One NVLink domain needs no NVSHMEM.
    *(({"library": SMALL, "ranks": ranks}, {"kind": kind}, DeepEPTransport, "")
      for ranks in (2, 8) for kind in ("auto", "deepep")),
    *(({"library": library, "ranks": ranks}, options, FixedSizeTransport if options else CollectiveTransport,
       f"DeepEP's {why}.*; {APART}")
      for library, ranks, options, why in (
          (SMALL, 16, {}, NO_NVSHMEM), (SMALL, 3, {}, ODD), (DEEPEP, 16, BLIND, FAR), (PADDLES, 2, BLIND, NO_WORST))),
    # And with counts, which both of these serve.
    *(({"library": library, "ranks": ranks}, {"max_tokens": 9}, DeepEPTransport, "")
      for library, ranks in ((DEEPEP, 16), (PADDLES, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "transport", "why"), CHOICES, ids=str)
def test_the_choice_and_its_reason_are_one_log_line(given, options, transport, why, world, caplog):
    group = world(**given)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        dispatcher = make_dispatcher(EXPERTS_OF_ALL, group, **options)
    assert isinstance(made := dispatcher.transport, transport)
    assert made.exact_rows == ("wait_for_counts" not in options)
    (record,) = caplog.records
    here = f"{EXPERTS_OF_ALL} experts, {EXPERTS_OF_ALL // group.size()} here"
    line = rf"expert parallelism over {re.escape(dispatcher.name)}: {here} \(.*{why}.*\)"
    assert re.fullmatch(line, record.getMessage(), re.DOTALL), record.getMessage()
    assert record.levelname == ("WARNING" if CANNOT in why else "INFO"), "a fallback is said"
    if given.get("library") is SMALL and transport is DeepEPTransport:
        assert made._sized_buffer(256).sizes == (512 * group.size(), 0)


ASKED = {"kind": "deepep"}
LOAD = "max_load is 1.5, and"
REFUSED = [
    ({}, {"kind": "symmetric"}, EngineUnavailableError, "symmetric memory cannot be used: the ranks are on 2 hosts"),
    ({"library": SMALL, "ranks": 16}, ASKED, EngineUnavailableError, f"DeepEP cannot be used: its {NO_NVSHMEM}"),
    ({"library": SMALL, "ranks": 3}, ASKED, EngineUnavailableError, f"its {ODD}"),
    *(({"library": library, "ranks": ranks}, ASKED | BLIND, ConfigError,
       f"wait_for_counts is False, and DeepEP's {why}; needed: True, or")
      for library, ranks, why in ((DEEPEP, 16, FAR), (PADDLES, 2, NO_WORST))),
    ({}, {"max_load": 1.5}, ConfigError, f"{LOAD} wait_for_counts True"),
    ({}, {"max_load": 1.5} | BLIND, ConfigError, rf"{LOAD} only symmetric .*; it was not chosen \(DeepEP is"),
    ({}, {"kind": "collective", "max_load": 1.5} | BLIND, ConfigError, r"not chosen \(as asked for"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "error", "words"), REFUSED, ids=str)
def test_what_was_asked_for_and_cannot_be_is_refused(given, options, error, words, world):
    with pytest.raises(error, match=words):
        make_dispatcher(EXPERTS_OF_ALL, world(**given), **options)


def test_symmetric_memory_heeds_a_load(world):
    made = make_dispatcher(8, world(maps=True), max_load=1.5, **BLIND).transport
    assert made._limit.slots(4, 0) == 6 * BLIND["max_tokens"]


def test_one_rank_never_waits():
    for group in (None, Group(1)):
        assert isinstance(make_dispatcher(8, group, **BLIND), LocalDispatcher)


def test_ranks_say_together_why_they_cannot_map_each_others_memory(monkeypatch):
    """The first reason that any rank has; and before any of them maps anything."""
    said = []

    def from_all(group, *words):
        said.append(words)
        return [list(words), ["another", ""] if len(words) > 1 else ["no peer access"]]

    monkeypatch.setattr(peer_memory, "_from_all", from_all)
    monkeypatch.setattr(peer_memory, "_own_problem", lambda: "")
    named = lambda size, name: SimpleNamespace(size=lambda: size, group_name=name)  # noqa: E731
    assert "the group has 16" in peer_memory.peers_problem(named(16, "large")) and not said
    group = named(2, "apart")
    assert peer_memory.peers_problem(group) == "the ranks are on 2 hosts" and len(said) == 1
    assert peer_memory.peers_problem(group) == "the ranks are on 2 hosts" and len(said) == 1
    monkeypatch.setattr(peer_memory.platform, "node", lambda: "another")
    monkeypatch.setattr(peer_memory.torch.cuda, "current_device", lambda: 0)
    mapped = SimpleNamespace(map=said.append)
    monkeypatch.setattr(peer_memory, "TorchPeers", lambda group, device: mapped)
    # Another group of the same name, as after `destroy_process_group`.
    assert peer_memory.peers_problem(named(2, "apart")) == "no peer access"
    assert said[2:] == [peer_memory.HEAD, ("",)]


def test_the_library_is_found_by_what_it_offers(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    library, why = find_library()
    assert library is None and "deep_ep" in why
    with pytest.raises(EngineUnavailableError, match="DeepEP is not available: deep_ep"):
        make_dispatcher(8, Group(), kind="deepep")
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    lacks = "deep_ep has no Buffer with get_dispatch_layout, dispatch, combine"
    assert find_library() == (None, lacks)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object))
    assert find_library() == (None, lacks)
    monkeypatch.setitem(sys.modules, "deep_ep", emulated.LIBRARY)
    assert find_library()[0] is emulated.LIBRARY
    assert isinstance(make_dispatcher(8, Group(), kind="deepep").transport, DeepEPTransport)


def tokens_of(count=12, seed=5):
    """x, ids and weights of one rank."""
    data = source(count, seed)
    return [torch.from_numpy(array) for array in (data.x, data.ids, data.weights)]


@pytest.mark.parametrize("frozen", ["x", "weights", "both"])
def test_frozen_inputs(frozen):
    x, ids, weights = tokens_of()
    x.requires_grad_(frozen == "weights")
    weights.requires_grad_(frozen == "x")
    received = Dispatcher(LocalTransport(EXPERTS)).dispatch(x, ids, weights)
    assert received.probs.requires_grad == received.x.requires_grad == (frozen != "both")
    if frozen != "both":
        (received.x.float().sum() + received.probs.sum()).backward()
        assert (x.grad is None) == (frozen == "x")
        assert (weights.grad is None) == (frozen == "weights")


def test_tangents_that_autograd_would_not_see_are_refused():
    x, ids, weights = tokens_of()
    dispatcher = Dispatcher(Careless(EXPERTS))
    received = dispatcher.dispatch(x, ids, weights)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a backward alone"):
        dispatcher.dispatch(forward_ad.make_dual(x, x), ids, weights)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a backward alone"):
        dispatcher.combine(forward_ad.make_dual(received.x, received.x), received.handle)


def test_local_dispatch_moves_nothing():
    """What it delivers is in tests/routing/test_routing_ids.py."""
    x, ids, weights = tokens_of()
    dispatcher = make_dispatcher(EXPERTS)
    received = dispatcher.dispatch(x, ids, weights)
    assert isinstance(make_dispatcher(EXPERTS, Group(1)), LocalDispatcher)
    assert received.x is x and dispatcher.combine(x, received.handle) is x
    assert received.indices.dtype == torch.int64
    empty = dispatcher.dispatch(x[:0], ids[:0], weights[:0])
    assert empty.tokens_per_expert == [0] * EXPERTS and empty.x.shape[0] == 0
    with pytest.raises(ShapeError, match=r"\(3, 256\).*delivered 12 rows"):
        dispatcher.combine(x[:3], received.handle)


class Careless(LocalTransport):
    """A library that sums whatever it is given, and leaves what was in memory where a slot went nowhere."""

    moves = True

    def combine(self, x, handle, weights=None):
        if weights is None:
            return x.clone(), None
        assert not weights.isnan().any()
        return x, torch.where(weights == 0, torch.nan, weights)


def test_gradients_of_dropped_slots_are_zeros_whatever_comes_and_whatever_a_library_returns():
    x, ids, weights = tokens_of()
    narrow = ids.clamp(max=2**31 - 1).to(torch.int32)
    received = Dispatcher(Careless(EXPERTS)).dispatch(x, narrow, weights.requires_grad_())
    assert received.indices.dtype == torch.int64
    here = (ids >= 0) & (ids < EXPERTS)
    assert torch.equal(received.indices >= 0, here) and not here.all()
    received.probs.backward(torch.where(here, 2.0, torch.nan))
    assert torch.equal(weights.grad, 2.0 * here)


@pytest.mark.parametrize("drops_any_id", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_route_keeps_ids_that_the_caller_cannot_write(dtype, drops_any_id):
    transport = LocalTransport(EXPERTS)
    transport.drops_any_id = drops_any_id
    x, ids, weights = tokens_of()
    given = ids.clamp(max=2**31 - 1).to(dtype)
    kept = Dispatcher(transport).dispatch(x, given, weights).handle.topk_idx
    before = kept.clone()
    given.fill_(1)
    assert torch.equal(kept, before) and bool((before >= EXPERTS).any()) == drops_any_id


BOUND = "max_tokens is 96 on rank 1, and the others did not .* no more tokens"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("Connection closed by peer", RankLostError, BOUND),
        ("a typing error", RuntimeError, "^a typing error$"),
    ],
)
def test_a_bound_that_the_others_do_not_compare(said, kind, words):
    """One rank has more tokens than before, and the others wait in another collective."""

    class Silent:
        rank, world_size = 1, 2

        def exchange(self, *_):
            raise RuntimeError(said)

    with pytest.raises(kind, match=words):
        RowLimit(96, Silent).check(torch.zeros(90, 8), torch.zeros(90, 2, dtype=torch.int64))
