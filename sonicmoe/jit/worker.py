"""A compile worker: a process `python -m sonicmoe.jit.worker` that compiles the one job which it reads
from standard input, and answers with one line of JSON.

Not `multiprocessing`, whose children import the main module again: a training script.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..config import unknown_flags
from .cache import CompileCache
from .child import search_path
from .plan import CompileJob


def start(
    settings: Mapping[str, Any], job: CompileJob, inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    """A worker for one job, which keeps the `inherited` descriptors open until it ends. OSError
    where the process does not start; whatever pickling the job raises.

    Args:
        settings: `CompileCache.settings`.
    """
    # Jobs are dataclasses of this package; the pipe joins two processes of one user and one code.
    request = pickle.dumps((settings, job))
    told = unknown_flags()  # this process has warned of them; its workers need not repeat it
    environment = {name: value for name, value in os.environ.items() if name not in told}
    # The worker imports the package of this process, which only `sys.path` may know.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": search_path()}, pass_fds=inherited,
    )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as requests:  # its status says that it ended
        requests.write(request)
    process.stdin = None
    return process


def main() -> None:
    """Read (settings of the cache, job), have the artefact published, and answer with the seconds
    that it took and a message, which is empty where it succeeded.
    """
    settings, job = pickle.load(sys.stdin.buffer)
    # Compilers print to descriptor 1, which must not mix with the answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started, message = time.monotonic(), ""
    try:
        job.compile(CompileCache(**settings))
    except Exception as error:
        message = f"{job.name}: {type(error).__name__}: {error}"
    json.dump({"seconds": time.monotonic() - started, "message": message}, answers)
    answers.close()


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal. The parent reports it, and its workers need not.
    with suppress(KeyboardInterrupt):
        main()
