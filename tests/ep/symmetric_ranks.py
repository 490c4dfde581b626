"""Ranks over emulated symmetric memory, which are children of one process."""

from __future__ import annotations

import os
import random
import time

import emulated_peers
import torch
from ep_cases import EXPERTS, TOPK, source
from ep_layer import run_layer
from kernels.needs import can_load_kernels

from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.fixed_size import RowLimit
from sonicmoe.ep.peer_memory import OVERFLOW, PeerMemory
from sonicmoe.errors import ConfigError, RoutingError
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.reference import dequantize
from sonicmoe.quant.tokens import quantize_tokens
from sonicmoe.routing.ids import in_one_spelling

MOST = 70
# (columns, dtype): rows of vectors, of words and of bytes.
WIDTHS = ((64, "bfloat16"), (6, "float32"), (7, "bfloat16"), (16, "float16"), (136, "fp8"))


def exchanged(transport, x, ids, weights, dout):
    """All four exchanges of a layer whose experts multiply; by name."""
    meanwhile = []
    received = transport.dispatch(x, ids, weights, lambda: meanwhile.append(True))
    assert meanwhile == [True]
    real = (received.topk_idx >= 0).any(1)
    rows = received.x
    plain = dequantize(rows).to(torch.bfloat16) if isinstance(rows, BlockScaledTensor) else rows
    y, _ = transport.combine(plain * 3, received.handle)
    gradient = transport.dispatch_cached(dout, received.handle)
    assert not gradient[~real].any(), "gradients of nobody"
    share = torch.where(received.topk_idx >= 0, received.topk_weights, 0.0)
    # What stands at slots of other ranks is nobody's.
    dirty = torch.where(received.topk_idx >= 0, share, torch.nan) if transport.masks else share
    dx, dweights = transport.combine(gradient, received.handle, dirty)
    found = {"ids": received.topk_idx[real], "weights": share[real], "x": plain[real], "y": y}
    return found | {"dx": dx, "dweights": dweights, "counts": received.tokens_per_expert}


def equals(exchange, folder):
    """Every kind of row, through symmetric memory and through gloo, with ranks that are slow at random."""
    rank, world = exchange.rank, exchange.world_size
    collective, slow = CollectiveTransport(EXPERTS, exchange), random.Random(rank)
    peers = transports(folder, exchange, MOST)
    for turn in range(4 if world == 2 else 1):  # many ranks draw many sizes
        for width, dtype in WIDTHS:
            sizes = random.Random(10 * turn + width)
            tokens = [sizes.choice((0, 1, 33, MOST)) for _ in range(world)][rank]
            given = source(tokens, 5 + rank)
            ids = torch.from_numpy(given.ids)  # dropped by -1 and by ids beyond the experts
            known = in_one_spelling(ids, EXPERTS)
            plain = torch.randn(2, tokens, width).to(getattr(torch, dtype, torch.bfloat16))
            x = quantize_tokens(plain[0]) if dtype == "fp8" else plain[0]
            others = torch.from_numpy(given.weights), plain[1]
            wanted = exchanged(collective, x, known, *others)
            for name, transport in peers.items():
                time.sleep(slow.random() * 0.004)
                found = exchanged(transport, x, ids, *others)
                counts = None if "fixed" in name else wanted["counts"]
                assert found.pop("counts") == counts, (name, counts)
                for key, tensor in found.items():
                    assert tensor.dtype == wanted[key].dtype
                    assert torch.equal(tensor, wanted[key]), (name, turn, width, dtype, key)


def loads(exchange, folder):
    """`max_load` of 1: a dispatch that just fits, one that does not, and one behind it."""
    rank, world, tokens = exchange.rank, exchange.world_size, 16
    peers = emulated_peers.FilePeers(folder, world, rank)
    memory = PeerMemory(peers)

    def bounded(max_load):
        limit = RowLimit(tokens, lambda: exchange, max_load)
        return emulated_peers.made(peers, *KERNELS, limit, memory)

    evenly = torch.arange(tokens * TOPK).reshape(tokens, TOPK) % EXPERTS
    crowd = torch.arange(TOPK).expand(tokens, TOPK).contiguous()  # 2 of 3 are of rank 0
    x, weights = torch.randn(tokens, 8), torch.rand(tokens, TOPK)
    transport, collective = bounded(1.0), CollectiveTransport(EXPERTS, exchange)

    def fits():
        found = exchanged(transport, x, evenly, weights, x)
        wanted = exchanged(collective, x, evenly, weights, x)
        assert found.pop("counts") is None and len(found["ids"]) <= tokens * TOPK
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())

    fits()
    received = transport.dispatch(x, crowd, weights)
    assert received.x.shape[0] == tokens * TOPK
    transport.combine(received.x, received.handle)
    # Ranks 0 and 1 both get too many.
    said = [f"rank {n} was to get {(2 - n) * world * tokens} slots in an earlier" for n in (0, 1)]
    for call in (fits, memory.check):
        try:
            call()
        except RoutingError as error:
            assert any(words in str(error) for words in said)
            assert "gradients of that step are incomplete" in str(error)
        else:
            raise AssertionError("nobody was told")
        fits()
        transport.dispatch(x, crowd, weights)
    memory._seen[OVERFLOW] = 0
    fits()
    try:
        bounded(1.0 + rank).dispatch(x, evenly, weights)
    except ConfigError as error:
        assert f"max_load in thousandths is {1000 + 1000 * rank} on rank {rank}" in str(error)
    else:
        raise AssertionError("each rank has another bound")


def ends(exchange, folder, fatal):
    """The last rank ends before its exchange number `fatal` of two layers."""
    rank, world = exchange.rank, exchange.world_size
    peers = emulated_peers.FilePeers(folder, world, rank, timeout_s=2.0)
    transport = emulated_peers.made(peers, *KERNELS)
    if rank == world - 1:
        calls = iter(range(fatal))
        for name in ("dispatch", "combine", "dispatch_cached"):
            setattr(transport, name, ending(getattr(transport, name), calls))
    for _ in range(2):
        run_layer(Dispatcher(transport), source(12, rank), rank)


def ending(original, calls):
    return lambda *given: original(*given) if next(calls, None) is not None else os._exit(9)


KERNELS = []  # a module, where it can be compiled here


def load_kernels(folder):
    """Load the kernels once, before ranks are forked."""
    if can_load_kernels():
        KERNELS.append(emulated_peers.kernels(folder))


def transports(folder, exchange, most_tokens):
    return emulated_peers.transports(folder, exchange, most_tokens, *KERNELS) if KERNELS else {}


WORLDS = {"equals": equals, "loads": loads, "ends": ends}
NAMES = ["equals 2", "equals 8", "loads 4", *(f"ends 4 {fatal}" for fatal in (4, 5, 6, 7))]
