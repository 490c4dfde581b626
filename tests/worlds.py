"""Starting worlds of processes: a whitelisted environment, bounded waits, and the output of whoever failed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# What a rank needs of the caller's shell; proxies and other frameworks' launch variables would change what is tested.
WHITELIST = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")
TIMEOUT_S = 120


def environment(**extra):
    """The whitelisted variables, the checkout importable, one computing thread."""
    kept = {name: os.environ[name] for name in WHITELIST if name in os.environ}
    path = os.pathsep.join(str(p) for p in (ROOT, TESTS, *(TESTS / name for name in ("ep", "ernie_compat", "paddle"))))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "GLOO_SOCKET_IFNAME": "lo", **extra}


def free_ports(count):
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def torchrun_variables(world):
    """Per rank, what torchrun would set."""
    (port,) = free_ports(1)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def paddle_variables(world):
    """Per rank, what paddle.distributed.launch would set."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(world)]
    shared = {
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    return [
        {**shared, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoints[rank]} for rank in range(world)
    ]


def start_world(command_of_rank, variables):
    """One process per rank; `command_of_rank(rank)` is its command line."""
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command_of_rank(rank))],
            env=environment(**extra),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, extra in enumerate(variables)
    ]


def finish(processes, timeout=TIMEOUT_S):
    """`(exit code, stdout, stderr)` of every process; all are gone afterwards."""
    deadline, results = time.monotonic() + timeout, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return results


def run_world(command_of_rank, variables, timeout=TIMEOUT_S):
    """Run to the end; every rank must succeed. Returns each rank's stdout."""
    results = finish(start_world(command_of_rank, variables), timeout)
    for rank, (code, _, err) in enumerate(results):
        assert code == 0, f"rank {rank} exited with {code}:\n{err[-4000:]}"
    return [out for _, out, _ in results]
