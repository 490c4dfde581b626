"""Ranks that are children of a process which has imported what they need: one import for all of them,
where a fresh interpreter for each would take longer to start than most ranks take to run.

They are forked before the process has a thread or a process group, and none of them runs the end of
the interpreter, in which forked ranks hang now and then.
"""

from __future__ import annotations

import ctypes
import gc
import os
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
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
