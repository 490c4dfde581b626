"""Dispatchers in one process: recorded DeepEP tensors, finding the library, and what is refused."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import emulated_deepep as emulated
import numpy as np
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
from sonicmoe.ep.symmetric import SymmetricTransport
from sonicmoe.errors import (
    EngineUnavailableError,
    ShapeError,
)

DEEPEP = Path(__file__).parents[1] / "data" / "deepep"


class Group:
    """What a transport asks of a process group."""

    def __init__(self, size=2, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def bf16(bits):
    words = bits.view(np.uint16).astype(np.uint32) << 16
    return torch.from_numpy(words.view(np.float32)).to(torch.bfloat16)


class Recording:
    """A `deep_ep` whose Buffer replays one rank's recorded dispatch and checks what it is asked."""

    def __init__(self, rank):
        with np.load(DEEPEP / f"dispatched_rank{rank}.npz") as data:
            self.arrays = {name: data[name] for name in data.files}
        self.combined, recording = [], self

        class Buffer:
            get_dispatch_config = get_combine_config = staticmethod(
                lambda ranks: SimpleNamespace(
                    get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes,
                    get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
                )
            )

            def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
                assert num_nvl_bytes == 2 * 256

            def get_dispatch_layout(self, topk_idx, num_experts):
                assert num_experts == 8
                assert np.array_equal(topk_idx.numpy(), recording.arrays["topk_idx"])
                return "per rank", None, "per expert", "in rank", None

            def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, **layout):
                a = recording.arrays
                if handle is not None:
                    assert topk_idx is None and topk_weights is None and not layout
                    return bf16(a["recv_x"]), None, None, None, None, None
                assert torch.equal(x, bf16(a["x"]))
                assert np.array_equal(topk_weights.numpy(), a["topk_weights"])
                assert layout["is_token_in_rank"] == "in rank"
                assert layout["num_tokens_per_expert"] == "per expert"
                names = ("recv_topk_idx", "recv_topk_weights")
                counts = a["num_recv_tokens_per_expert_list"].tolist()
                received = (torch.from_numpy(a[name]) for name in names)
                return bf16(a["recv_x"]), *received, counts, "handle", None

            def combine(self, x, handle, topk_weights=None):
                assert handle == "handle" and x.is_contiguous() and x.dtype == torch.bfloat16
                recording.combined.append(topk_weights)
                back = torch.ones(len(recording.arrays["x"]), x.shape[1], dtype=x.dtype)
                weights = torch.ones(recording.arrays["topk_idx"].shape)
                return back, None if topk_weights is None else weights, None

        self.Buffer = Buffer


@pytest.mark.parametrize("rank", [0, 1])
def test_recorded_deepep_dispatch_goes_through_unchanged(rank):
    library = Recording(rank)
    a = library.arrays
    dispatcher = Dispatcher(DeepEPTransport(8, Group(2, rank), library))
    x, weights = bf16(a["x"]).requires_grad_(), torch.from_numpy(a["topk_weights"]).requires_grad_()
    received = dispatcher.dispatch(x, torch.from_numpy(a["topk_idx"]).to(torch.int32), weights)
    assert torch.equal(received.x, bf16(a["recv_x"]))
    assert received.indices.dtype == torch.int64
    assert np.array_equal(received.indices.numpy(), a["recv_topk_idx"])
    assert np.array_equal(received.probs.detach().numpy(), a["recv_topk_weights"])
    assert received.tokens_per_expert == a["num_recv_tokens_per_expert_list"].tolist()
    y = dispatcher.combine(received.x * 1.0, received.handle)
    assert y.shape == x.shape
    # A gradient at foreign slots, NaN even, must not reach DeepEP's sum over ranks.
    dirty = torch.where(received.indices < 0, torch.nan, 2.0)
    torch.autograd.backward([y, received.probs], [torch.ones_like(y), dirty])
    assert library.combined[0] is None
    assert torch.equal(library.combined[1], torch.where(received.indices < 0, 0.0, 2.0))
    assert torch.equal(weights.grad, (torch.from_numpy(a["topk_idx"]) >= 0).to(torch.float32))
    assert torch.equal(x.grad, torch.ones_like(x))


def test_buffer_grows_with_the_rows_and_is_kept_otherwise():
    made = []

    class Buffer(Recording(0).Buffer):
        def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
            made.append(num_nvl_bytes)

        def dispatch(self, x, handle=None):
            return (x,)

    transport = DeepEPTransport(8, Group(), SimpleNamespace(Buffer=Buffer))
    for hidden in (64, 64, 32, 128):
        transport.dispatch_cached(torch.zeros(1, hidden, dtype=torch.bfloat16), "handle")
    assert made == [128, 256]


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


APART = "no symmetric memory: the ranks are on 2 hosts"


@pytest.mark.parametrize(
    ("gpu", "peers", "installed", "options", "transport", "why"),
    [
        (False, True, True, {}, CollectiveTransport, "the group has no NCCL, so no GPUs"),
        (True, True, True, {}, SymmetricTransport, "the ranks map each other's memory"),
        (True, False, False, {}, CollectiveTransport, f"no DeepEP: not built; {APART}"),
        (True, False, True, {}, DeepEPTransport, f"DeepEP is installed; {APART}"),
        (True, True, True, {"kind": "symmetric"}, SymmetricTransport, "as asked for"),
        (True, True, True, {"kind": "deepep"}, DeepEPTransport, "as asked for"),
        (True, True, True, {"kind": "collective"}, CollectiveTransport, "as asked for"),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason_are_one_log_line(
    gpu, peers, installed, options, transport, why, monkeypatch, caplog
):
    problem = "" if peers else "the ranks are on 2 hosts"
    monkeypatch.setattr(select, "peers_problem", lambda group: problem)
    found = (emulated.LIBRARY, "") if installed else (None, "not built")
    monkeypatch.setattr(select, "is_gpu_group", lambda group: gpu)
    monkeypatch.setattr(select, "find_library", lambda: found)
    monkeypatch.setattr(select, "GroupExchange", Exchange)
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        dispatcher = make_dispatcher(8, Group(), **options)
    assert isinstance(dispatcher.transport, transport)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"expert parallelism over {dispatcher.name}: 8 experts, 4 here ({why})"


def test_symmetric_memory_by_name_where_ranks_are_apart(monkeypatch):
    monkeypatch.setattr(select, "is_gpu_group", lambda group: True)
    monkeypatch.setattr(select, "peers_problem", lambda group: "the ranks are on 2 hosts")
    words = "symmetric memory cannot be used: the ranks are on 2 hosts"
    with pytest.raises(EngineUnavailableError, match=words):
        make_dispatcher(8, Group(), kind="symmetric")


def test_ranks_say_together_why_they_cannot_map_each_others_memory(monkeypatch):
    """The first reason that any rank has; and before any of them maps anything."""
    said = []

    def from_all(group, *words):
        said.append(words)
        return [list(words), ["another", ""] if len(words) > 1 else ["no peer access"]]

    monkeypatch.setattr(peer_memory, "_from_all", from_all)
    monkeypatch.setattr(peer_memory, "_own_problem", lambda group: "")
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


def without_nvshmem():
    """The emulated library as a build without NVSHMEM offers it."""

    class Config(emulated.Config):
        def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
            why = "'NVSHMEM is disable during compilation'"
            raise RuntimeError(f"Failed: Assertion error buffer.cu:1 {why}\nat")

    class Buffer(emulated.Buffer):
        def __init__(self, group, *sizes):
            self.sizes = sizes

        get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: Config())

    return SimpleNamespace(Buffer=Buffer)


def gpu_world(monkeypatch, library):
    monkeypatch.setattr(select, "is_gpu_group", lambda group: True)
    monkeypatch.setattr(select, "find_library", lambda: (library, ""))
    monkeypatch.setattr(select, "peers_problem", lambda group: "no peers")
    made = SimpleNamespace(name="NCCL", num_experts=16, num_local_experts=1)
    monkeypatch.setattr(select, "_collective", lambda num_experts, group, bound: made)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", ["auto", "deepep"])
def test_one_nvlink_domain_needs_no_nvshmem(monkeypatch, ranks, kind):
    gpu_world(monkeypatch, without_nvshmem())
    transport = make_dispatcher(16, Group(ranks), kind=kind).transport
    assert isinstance(transport, DeepEPTransport)
    assert transport._sized_buffer(256).sizes == (512 * ranks, 0)


NO_NVSHMEM = "Buffer cannot serve 16 ranks: Failed: .*NVSHMEM is disable during compilation"


def test_beyond_it_collectives_are_taken_and_the_reason_said(monkeypatch, caplog):
    gpu_world(monkeypatch, without_nvshmem())
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        assert make_dispatcher(16, Group(16)).name == "NCCL"
    (record,) = caplog.records
    assert re.search(NO_NVSHMEM, record.getMessage()), record.getMessage()
    assert record.levelname == "WARNING", "a fallback is said"
    with pytest.raises(EngineUnavailableError, match=f"DeepEP cannot be used: its {NO_NVSHMEM}"):
        make_dispatcher(16, Group(16), kind="deepep")


def test_a_number_of_ranks_that_deepep_has_no_configuration_for(monkeypatch):
    def unsupported(num_ranks):
        raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")

    library = without_nvshmem()
    library.Buffer.get_dispatch_config = staticmethod(unsupported)
    gpu_world(monkeypatch, library)
    assert make_dispatcher(15, Group(3)).name == "NCCL"
    with pytest.raises(EngineUnavailableError, match="3 ranks: Unsupported number of EP ranks: 3"):
        make_dispatcher(15, Group(3), kind="deepep")


@pytest.mark.parametrize("frozen", ["x", "weights", "both"])
def test_frozen_inputs(frozen):
    library = Recording(0)
    a = library.arrays
    dispatcher = Dispatcher(DeepEPTransport(8, Group(), library))
    x = bf16(a["x"]).requires_grad_(frozen == "weights")
    weights = torch.from_numpy(a["topk_weights"]).requires_grad_(frozen == "x")
    received = dispatcher.dispatch(x, torch.from_numpy(a["topk_idx"]), weights)
    assert received.probs.requires_grad == received.x.requires_grad == (frozen != "both")
    if frozen != "both":
        (received.x.float().sum() + received.probs.sum()).backward()
        assert (x.grad is None) == (frozen == "x")
        assert (weights.grad is None) == (frozen == "weights")


def test_tangents_that_autograd_would_not_see_are_refused():
    library = Recording(0)
    x = bf16(library.arrays["x"])
    ids, weights = (torch.from_numpy(library.arrays[name]) for name in ("topk_idx", "topk_weights"))
    dispatcher = Dispatcher(DeepEPTransport(8, Group(), library))
    received = dispatcher.dispatch(x, ids, weights)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a backward alone"):
        dispatcher.dispatch(forward_ad.make_dual(x, x), ids, weights)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a backward alone"):
        dispatcher.combine(forward_ad.make_dual(received.x, received.x), received.handle)


def test_local_dispatch_moves_nothing():
    """What it delivers is in tests/routing/test_routing_ids.py."""
    data = source(12, 5)
    x, ids, weights = (torch.from_numpy(array) for array in (data.x, data.ids, data.weights))
    dispatcher = make_dispatcher(EXPERTS)
    received = dispatcher.dispatch(x, ids, weights)
    assert isinstance(make_dispatcher(EXPERTS, Group(1)), LocalDispatcher)
    assert received.x is x and dispatcher.combine(x, received.handle) is x
    assert received.indices.dtype == torch.int64
    empty = dispatcher.dispatch(x[:0], ids[:0], weights[:0])
    assert empty.tokens_per_expert == [0] * EXPERTS and empty.x.shape[0] == 0
    with pytest.raises(ShapeError, match=r"\(3, 32\).*delivered 12 rows"):
        dispatcher.combine(x[:3], received.handle)


class Careless(LocalTransport):
    """A library that leaves whatever was in memory where a slot went nowhere."""

    def combine(self, x, handle, weights=None):
        return x, None if weights is None else torch.where(weights == 0, torch.nan, weights)


def test_gradients_of_dropped_slots_are_zeros_whatever_a_library_returns():
    data = source(12, 5)
    x, ids, weights = (torch.from_numpy(array) for array in (data.x, data.ids, data.weights))
    received = Dispatcher(Careless(EXPERTS)).dispatch(x, ids, weights.requires_grad_())
    received.probs.sum().backward()
    here = (ids >= 0) & (ids < EXPERTS)
    assert not here.all() and torch.equal(weights.grad, here.to(torch.float32))
