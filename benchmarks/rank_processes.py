"""The ranks of a benchmark: those that torchrun has started, or one process for each GPU of this host.
Imported by the benchmarks beside it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def world_size(ranks: int | None, quick: bool) -> int:
    """The ranks of torchrun, else those asked for, else all GPUs; two where `quick` runs on CPUs."""
    asked = int(os.environ["WORLD_SIZE"]) if _is_launched() else ranks
    return asked or (2 if quick else torch.cuda.device_count())


def run_ranks(
    work: Callable[..., None], size: int, quick: bool, *arguments: Any, limit_s: float = float("inf"),
    joined: bool = True,
) -> None:  # fmt: skip
    """Call `work(rank, device, *arguments)` in every rank; `work` is a function of a module, because
    another process has to find it. joined: within a process group.

    Raises:
        TimeoutError: ranks ran for more than `limit_s` seconds, and were stopped.
        torch.multiprocessing.ProcessException: a rank failed or died; the others were stopped.
    """
    given = quick, joined, work, arguments
    if _is_launched():
        _run_rank(int(os.environ["RANK"]), None, size, *given)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = torch.multiprocessing.spawn(_run_rank, (port, size, *given), nprocs=size, join=False)
    deadline = time.monotonic() + limit_s
    while not ranks.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"the ranks were stopped after {limit_s:.0f} s")


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_rank(
    rank: int, port: int | None, size: int, quick: bool, joined: bool, work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    """One rank's part of everything; `port` is None where torchrun has set the variables."""
    if port is not None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size}
        given = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in given.items()})
    device = torch.device("cpu" if quick else f"cuda:{os.environ['LOCAL_RANK']}")
    if quick:
        torch.set_num_threads(1)  # ranks that share cores wait for each other's threads
    else:
        torch.cuda.set_device(device)
    if not joined:
        work(rank, device, *arguments)
        return
    dist.init_process_group("gloo" if quick else "nccl", device_id=None if quick else device)
    work(rank, device, *arguments)
    dist.barrier()
    dist.destroy_process_group()
