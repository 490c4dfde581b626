"""Ranks that are children of a process which has imported what they need: one import for all of them,
where a fresh interpreter for each would take longer to start than most ranks take to run.

They are forked before the process has a thread or a process group, and none of them runs the end of
the interpreter, in which forked ranks hang now and then. Forked or not, a rank hangs where a model
under DDP goes after `destroy_process_group`: the last reference to gloo's group goes with it, while
Python's lock is held that gloo's thread waits for. So a model goes before, or stays.

python forked.py JSON runs a program in each rank, as a launcher starts it (`worlds.run_forked`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable

GRACE_S = 30.0  # of ranks that may wait for one that has failed
_PR_SET_PDEATHSIG = 1


def run_ranks(world: int, run: Callable[[int], None]) -> list[int]:
    """`run(rank)` in a process for each rank; the exit code of each: 0, 1 behind a traceback of what it
    raised, or a negative signal. Those that still run `GRACE_S` after another has failed are killed.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.freeze()  # so that no collection of a rank copies what they share
    children = {_fork(rank, run): rank for rank in range(world)}
    codes, deadline = [0] * world, float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            code = codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + GRACE_S) if code else deadline
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return codes


def _fork(rank: int, run: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends where its parent does
        run(rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """imports: modules for all ranks. commands, variables: of each rank. outputs: files for what each
    prints.
    """
    given = json.loads(sys.argv[1])
    for name in given["imports"]:
        importlib.import_module(name)

    def run(rank: int) -> None:
        os.environ.update(given["variables"][rank])
        os.dup2(os.open(given["outputs"][rank], os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
        sys.argv = given["commands"][rank]
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")

    sys.exit(any(run_ranks(len(given["commands"]), run)))


if __name__ == "__main__":
    main()
