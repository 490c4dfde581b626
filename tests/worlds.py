"""Starting worlds of processes: a whitelisted environment, bounded waits, and the output of whoever
failed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import processes
from processes import ROOT, TESTS

# What a rank needs of the caller's shell; proxies and other frameworks' launch variables would
# change what is tested.
WHITELIST = (
    *("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
    *("VIRTUAL_ENV", "XDG_CACHE_HOME", "SONICMOE_TEST_CACHE"),
    # Which instructions the libraries may use: a world computes as the process that starts it.
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE"),
)
TIMEOUT_S, GRACE_S = 240, 30
FIRST_PORT = 12000


def environment(**extra):
    """The whitelisted variables, the checkout importable, one computing thread."""
    kept = {name: os.environ[name] for name in WHITELIST if name in os.environ}
    path = os.pathsep.join(
        str(p) for p in (ROOT, TESTS, *(TESTS / name for name in ("ep", "ernie_compat", "paddle")))
    )
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
    }


def free_ports(count):
    """Ports that nobody listens on at this moment, and that no other world is given as long as this
    process lives, below those that the system gives to outgoing connections by itself.

    A rank takes its port seconds after this call: one of the system's would now and then be another
    process's by then, and one that two worlds had found free would be the first one's.
    """
    systems = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    candidates = random.SystemRandom().sample(range(FIRST_PORT, int(systems[0])), 100 * count)
    found = []
    for port in candidates:
        with suppress(OSError):
            _reserve(port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{count} free ports were not found among {len(candidates)}")


def _reserve(port):
    """Lock a file of that name; OSError where another process of this user holds it."""
    folder = Path(tempfile.gettempdir()) / f"sonicmoe-tests-{os.getuid()}-ports"
    folder.mkdir(exist_ok=True)
    file = (folder / str(port)).open("w")
    _RESERVED.append(file)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_RESERVED: list[IO[str]] = []  # open, and therefore locked, as long as this process lives


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
        {**shared, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoints[rank]}
        for rank in range(world)
    ]


def start_world(command_of_rank, variables):
    """One process per rank; `command_of_rank(rank)` is its command line."""
    return [
        processes.start(command_of_rank(rank), environment(**extra), ROOT)
        for rank, extra in enumerate(variables)
    ]


def finish(world, timeout=TIMEOUT_S):
    """`(exit code, stdout, stderr)` of every process; all are gone afterwards, killed ones (-9)
    after the time is up.

    Once one has failed, the others have `GRACE_S` left: they may wait for it in a collective for
    ever.
    """
    deadline, failed = time.monotonic() + timeout, False
    with ThreadPoolExecutor(len(world)) as pool:
        outputs = [pool.submit(process.communicate) for process in world]
        try:
            while any(process.poll() is None for process in world) and time.monotonic() < deadline:
                if not failed and any(process.poll() for process in world):
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.02)
        finally:
            for process in world:
                if process.poll() is None:
                    process.kill()
        return [
            (process.wait(), *output.result())
            for process, output in zip(world, outputs, strict=True)
        ]


def _ended_before_gloo(code, err):
    """Whether the interpreter was ending, and all output was written, when a thread of gloo that still
    held a tensor asked for it (pytorch/pytorch#179291). A loop of plain DDP on a busy machine dies
    so in one of twelve runs.
    """
    last = err.strip().rpartition("\n")[2]
    said = last == "terminate called without an active exception"
    return code == -signal.SIGABRT and said and "Traceback" not in err  # of an error before


def run_world(command_of_rank, variables, timeout=TIMEOUT_S):
    """Run to the end; every rank must succeed. Returns each rank's stdout."""
    results = finish(start_world(command_of_rank, variables), timeout)
    bad = [
        f"rank {rank} exited with {code}:\n{err[-4000:]}"
        for rank, (code, _, err) in enumerate(results)
        if code and not _ended_before_gloo(code, err)
    ]
    assert not bad, "\n".join(bad)
    return [out for _, out, _ in results]


def run_forked(command_of_rank, variables, imports, timeout=TIMEOUT_S):
    """`run_world` of scripts that may share one import of modules, because they read no variable of
    their rank before they run.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(len(variables))]
        given = {
            "imports": imports,
            "commands": [list(map(str, command_of_rank(rank))) for rank in range(len(variables))],
            "variables": variables,
            "outputs": list(map(str, outputs)),
        }
        run_world(lambda _: [TESTS / "forked.py", json.dumps(given)], [{}], timeout)
        return [output.read_text() for output in outputs]
