"""One process that has imported CuTe DSL and quack, and forks once per kernel: `python -P -m
sonicmoe.jit.cute_server ARCH`.

Importing both takes as long as compiling one kernel. A cold start compiles a dozen of them, and
pays for one import with this.

    rank ── starts ──► server: imports, waits for requests
    worker ── request and a socket for the answer ──► server ── fork ──► cute_build.main ──► answer

Standard input is a socket whose other end the rank and its workers share. It has no name, so that
no other process can send a request, and the server ends when the last of them is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import cute_build
from .child import BUILD_TIMEOUT_S, search_path

_MAX_REQUEST = 1 << 16
_STATUS = b"\n\0exit status "  # then the number; ends an answer that is complete
_IMPORTS = ("sonicmoe.kernels.quack_build", "cutlass.runtime", "tvm_ffi.cpp")


class CuteServer:
    """The rank's end: starts the process, and hands workers what they need to reach it."""

    def __init__(self, arch: str) -> None:
        """Start it; it imports while its first requests wait. OSError where there are no more
        processes or descriptors.
        """
        # Messages keep their borders, so that workers can share one end.
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A process with a second thread must not fork, and OpenBLAS would start one at the import.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with requests:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, arch],
                stdin=requests.fileno(),
                stdout=subprocess.DEVNULL,
                # A compiler that is not installed is the worker's to report.
                stderr=subprocess.DEVNULL,
                env={**os.environ, **threads, "PYTHONPATH": search_path()},
                start_new_session=True,
            )

    @property
    def descriptor(self) -> int:
        """For `build`, in a process that inherits it."""
        return self._requests.fileno()

    def close(self) -> None:
        """End it and everything that it still does, be it the import that nobody waits for."""
        self._requests.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def build(descriptor: int, request_file: Path, umask: int) -> tuple[int, str] | None:
    """`(exit status, output)` of `cute_build` on this request; None where there is no server, for
    example because CuTe DSL cannot be imported, or where the build died without a status.
    """
    ours, theirs = socket.socketpair()
    message = json.dumps({"request": str(request_file), "umask": umask}).encode()
    try:
        with ours:
            ours.settimeout(BUILD_TIMEOUT_S)
            with theirs, socket.socket(fileno=os.dup(descriptor)) as requests:
                socket.send_fds(requests, [message], [theirs.fileno()])
            answer = b"".join(iter(lambda: ours.recv(_MAX_REQUEST), b""))
    except OSError:
        return None
    output, ended, status = answer.rpartition(_STATUS)
    return (int(status), output.decode(errors="replace")) if ended else None


def serve(arch: str) -> None:
    """Fork for every request until nobody can send one any more."""
    # Relative: every fork works in the directory of its build.
    cute_build.set_environment(arch, Path())
    cute_build.leave_out_graph_compilers()
    for module in _IMPORTS:
        importlib.import_module(module)
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            message, (*descriptors,), _, _ = socket.recv_fds(requests, _MAX_REQUEST, 1)
            if not message:
                return
            if os.fork() == 0:
                os._exit(_answer(json.loads(message), descriptors[0]))
            for descriptor in descriptors:
                os.close(descriptor)
            _reap()


def _answer(message: dict[str, Any], descriptor: int) -> int:
    """In the fork: build, print to the worker's socket, and end with the status."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # The whole server's standard input; a compiler that asks a question must not wait.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if message["umask"] >= 0:
        os.umask(message["umask"])
    path = Path(message["request"])
    try:
        os.chdir(path.parent)
        status = cute_build.main(str(path))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(descriptor, _STATUS + str(status).encode())
    return status


def _reap() -> None:
    """Forget the forks that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    serve(sys.argv[1])
