"""Symmetric memory of ranks that are processes of this host: files that all of them map, and the very
kernels, compiled for the host.
"""

from __future__ import annotations

import time
from pathlib import Path

import kept
import torch
from ep_cases import EXPERTS
from kernels import host_cuda

from sonicmoe.ep.fixed_size import RowLimit
from sonicmoe.ep.peer_memory import PeerMemory, Peers
from sonicmoe.ep.symmetric import SymmetricTransport

SOURCE = host_cuda.ROOT / "sonicmoe" / "kernels" / "cuda" / "peer_rows.cu"
TIMEOUT_S = 60.0
# A rank that waits sleeps, because there are more ranks than cores.
SLEEP = "{ const timespec a_moment{0, 200000}; nanosleep(&a_moment, nullptr); }"
host_cuda.REWRITES = (*host_cuda.REWRITES, (r"__nanosleep\(\d+\);", SLEEP))


class FilePeers(Peers):
    name = "symmetric memory"

    def __init__(self, folder, world_size, rank, timeout_s=TIMEOUT_S):
        self.folder, self.world_size, self.rank = Path(folder), world_size, rank
        self.timeout_s, self.mapped = timeout_s, []

    def map(self, size):
        files = [self.folder / f"memory {len(self.mapped)} of {r}" for r in range(self.world_size)]
        unfinished = files[self.rank].with_suffix(".unfinished")
        unfinished.write_bytes(bytes(size))
        unfinished.rename(files[self.rank])
        deadline = time.monotonic() + self.timeout_s
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "a rank maps nothing"
            time.sleep(0.001)
        assert {file.stat().st_size for file in files} == {size}, "the ranks disagree"
        kept = [
            torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files
        ]
        self.mapped.append(size)
        return [memory.data_ptr() for memory in kept], kept

    def words(self, count):
        return torch.zeros([count], dtype=torch.int64)

    def check_device(self):
        pass


def kernels(folder):
    """The module; it goes into `folder` where nothing can be kept."""
    cache = kept.open_cache(Path(folder) / "local")
    return host_cuda.load("host_peer_rows_asleep", (SOURCE,), cache)


def made(peers, module, limit=None, memory=None):
    """The transport of one rank."""
    memory = memory or PeerMemory(peers)
    ranks = peers.world_size, peers.rank
    return SymmetricTransport(EXPERTS, ranks, lambda like: memory, limit=limit, kernels=module)


def transports(folder, exchange, most_tokens, module):
    """`{name: SymmetricTransport}`: with counts and without, over one memory."""
    peers = FilePeers(folder, exchange.world_size, exchange.rank)
    memory = PeerMemory(peers)
    memory.most_tokens = 32  # less than some ranks send
    limit = RowLimit(most_tokens, lambda: exchange)
    fixed = made(peers, module, limit, memory)
    return {"symmetric": made(peers, module, None, memory), "symmetric fixed": fixed}
