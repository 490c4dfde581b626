"""The ranks of a benchmark: those that torchrun has started, or one process for each GPU of this host.
Imported by the benchmarks beside it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def world_size(ranks: int | None, quick: bool) -> int:
    """The ranks of torchrun, else those asked for, else all GPUs; two where `quick` runs on CPUs."""
    asked = int(os.environ["WORLD_SIZE"]) if _is_launched() else ranks
    return asked or (2 if quick else torch.cuda.device_count())


def run_ranks(work: Callable[..., None], size: int, quick: bool, *arguments: Any) -> None:
    """Call `work(rank, device, *arguments)` in every rank, within a process group; `work` is a function
    of a module, because another process has to find it.
    """
    if _is_launched():
        _run_rank(int(os.environ["RANK"]), None, size, quick, work, arguments)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(_run_rank, (port, size, quick, work, arguments), nprocs=size)


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_rank(
    rank: int, port: int | None, size: int, quick: bool, work: Callable[..., None],
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
    dist.init_process_group("gloo" if quick else "nccl", device_id=None if quick else device)
    work(rank, device, *arguments)
    dist.barrier()
    dist.destroy_process_group()
