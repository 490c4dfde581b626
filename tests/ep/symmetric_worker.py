"""`symmetric_worker.py WORLD DIRECTORY KERNELS WHAT`: a world of ranks that are children of this
process, over emulated symmetric memory.

    equals    every kind of row, through symmetric memory and through gloo, with ranks that are slow at
              random; prints nothing unless bits differ
    loads     `max_load` of 1: a dispatch that just fits, one that does not, and one behind it
    dies N .. the last rank ends before its exchange number N of two layers; a world for each N
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time

import emulated_peers
import torch
import torch.distributed as dist
from ep_cases import EXPERTS, TOPK, source
from ep_layer import run_layer
from forked import run_ranks

from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.exchange_torch import TorchExchange
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


def compare(rank, world, folder, module):
    exchange = TorchExchange()
    transports = emulated_peers.transports(folder, exchange, MOST, module)
    collective, slow = CollectiveTransport(EXPERTS, exchange), random.Random(rank)
    for turn in range(4 if world == 2 else 2):  # many ranks draw many sizes
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
            for name, transport in transports.items():
                time.sleep(slow.random() * 0.004)
                found = exchanged(transport, x, ids, *others)
                counts = None if "fixed" in name else wanted["counts"]
                assert found.pop("counts") == counts, (name, counts)
                for key, tensor in found.items():
                    assert tensor.dtype == wanted[key].dtype
                    assert torch.equal(tensor, wanted[key]), (name, turn, width, dtype, key)


def loads(rank, world, folder, module):
    exchange, tokens = TorchExchange(), 16
    peers = emulated_peers.FilePeers(folder, world, rank)
    memory = PeerMemory(peers)

    def bounded(max_load):
        return emulated_peers.made(
            peers, module, RowLimit(tokens, lambda: exchange, max_load), memory
        )

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


def dies(rank, world, folder, module, fatal):
    peers = emulated_peers.FilePeers(folder, world, rank, timeout_s=2.0)
    transport = emulated_peers.made(peers, module)
    if rank == world - 1:
        calls = iter(range(fatal))
        for name in ("dispatch", "combine", "dispatch_cached"):
            setattr(transport, name, dying(getattr(transport, name), calls))
    for _ in range(2):
        run_layer(Dispatcher(transport), source(12, rank), rank)


def dying(original, calls):
    return lambda *given: original(*given) if next(calls, None) is not None else os._exit(9)


def main(world, folder, kernels, what, *fatal):
    torch.set_num_threads(1)
    module = emulated_peers.kernels(kernels)

    def run(rank, place, *numbers):
        if what == "dies":
            dies(rank, world, place, module, *numbers)
            return
        store = f"file://{place}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        {"equals": compare, "loads": loads}[what](rank, world, place, module)

    for numbers in [(int(number),) for number in fatal] or [()]:
        place = tempfile.mkdtemp(dir=folder)
        print(run_ranks(world, lambda rank: run(rank, place, *numbers)), flush=True)  # noqa: B023


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
