"""Two GPUs: a rank is killed inside dispatch, combine and their backwards. The other one ends in
bounded time and says why, over NCCL and over DeepEP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from gpu.lost_rank_gpu_worker import METHODS, TIMEOUT_S
from worlds import TESTS, environment, finish

from sonicmoe.ep.deepep import find_library, legacy_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# NCCL's watchdog looks every few seconds and may write a report before it ends the process. DeepEP
# waits 100 s on the host and about as long on the device.
BOUND_S = {"collective": TIMEOUT_S + 100, "deepep": 280}
# What the surviving rank says: our sentence, or that of the library that ended the process.
SAID = ("lost another rank", "remote process exited", "watchdog", "timeout", "timed out")


@cache
def no_deepep():
    library, why = find_library()
    return why if library is None else legacy_problem(library.module, 2)


@pytest.mark.parametrize("place", METHODS)
@pytest.mark.parametrize("kind", BOUND_S)
def test_the_other_rank_ends_and_says_why(kind, place, tmp_path):
    if kind == "deepep" and no_deepep():
        pytest.skip(f"DeepEP did NOT run: {no_deepep()}")
    worker = TESTS / "gpu" / "lost_rank_gpu_worker.py"
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(tmp_path), kind, place],
            # Packages may come from a path that only this process's `sys.path` knows.
            env=environment(PYTHONPATH=os.pathsep.join(sys.path), TORCH_NCCL_DUMP_ON_TIMEOUT="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # `finish` gives the others half a minute after a failure, and NCCL takes longer.
        patch.setattr("worlds.GRACE_S", BOUND_S[kind])
        survivor, victim = finish(processes, BOUND_S[kind] + 60)
    seconds = time.monotonic() - started
    for code, said, errors in (survivor, victim):
        assert "a whole step is done" in said, errors[-3000:]
        assert "not reached" not in said, (code, errors[-3000:])
    assert victim[0] == -9
    assert survivor[0] not in (0, -9), f"had to be stopped after {seconds:.0f} s"
    assert any(words in survivor[2].lower() for words in SAID), survivor[2][-3000:]
    print(f"{kind}, {place}: ended with {survivor[0]} after {seconds:.0f} s")
