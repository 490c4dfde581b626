"""Python processes that need not import their framework: a server that has imported it forks them.

Half of the time of a short training process goes into `import torch` or `import paddle`. What a
process runs, its environment, arguments, directory and output are its own; nothing of this package
is imported before the fork. Processes of one server share the seed of `hash`, so what may depend on
it between ranks is tested in processes started by a launcher.

    python preloaded.py MODULE...      the server: one JSON request per line on stdin, one process id per line on stdout
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

TORCH = ("torch", "torch._dynamo", "torch.distributed")  # an optimizer needs Dynamo
MODULES = {
    "torch": TORCH,
    "paddle": ("paddle",),
    "transformers": (
        *TORCH,
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.trainer",
    ),
}


class Process:
    """What tests use of `subprocess.Popen`, for a process of the server: text output, no input."""

    def __init__(
        self, framework: str, arguments: list[str], env: dict[str, str], cwd: Path
    ) -> None:
        """`python ARGUMENTS` (a script, `-m module` or `-c program`, and what follows)."""
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        folder = Path(self._folder.name)
        self._out, self._err, self._code = (folder / name for name in ("out", "err", "code"))
        request = {"arguments": arguments, "env": env, "cwd": str(cwd), "folder": str(folder)}
        server = _server(framework)
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pid, self.returncode = int(server.stdout.readline()), None

    def poll(self) -> int | None:
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    framework: str | None, arguments: list[str], env: dict[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """One process to its end, killed and TimeoutExpired after `timeout` seconds; without a
    framework, of a fresh interpreter.
    """
    if framework is None:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, cwd=cwd, timeout=timeout
        )
    process = Process(framework, arguments, env, cwd)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@cache
def _server(framework: str) -> subprocess.Popen[str]:
    from worlds import ROOT, environment

    server = subprocess.Popen(
        [sys.executable, __file__, *MODULES[framework]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    atexit.register(server.stdin.close)
    return server


def serve() -> dict | None:
    """Fork for every request; returns it in the forked process, None in the server when nobody asks
    any more.
    """
    children: dict[int, Path] = {}
    while True:
        if select.select([0], [], [], 0.01 if children else None)[0]:
            line = _read_line()
            if not line:
                return None
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return request
            children[pid] = Path(request["folder"])
            os.write(1, b"%d\n" % pid)
        for pid in list(children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                _report(children.pop(pid), os.waitstatus_to_exitcode(status))


def _report(folder: Path, code: int) -> None:
    unfinished = folder / "unfinished"
    with suppress(FileNotFoundError):  # nobody waits for it any more
        unfinished.write_text(str(code))
        unfinished.rename(folder / "code")


def _read_line() -> bytes:
    """Unbuffered: `select` would not see what a buffer holds."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


def become(request: dict, path_of_server: list[str]) -> None:
    """Run what the request says, in this process, as the interpreter would have."""
    for number, (name, flags) in enumerate([
        (os.devnull, os.O_RDONLY),
        (f"{request['folder']}/out", os.O_WRONLY | os.O_CREAT),
        (f"{request['folder']}/err", os.O_WRONLY | os.O_CREAT),
    ]):  # fmt: skip
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    kind, *rest = request["arguments"]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = str(Path(kind).parent) if kind not in ("-m", "-c") else request["cwd"]
    installed = [path for path in sys.path if path not in path_of_server]
    sys.path[:] = [own, *before, *installed]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def end(code: object) -> None:
    """End this process as the interpreter would, but for freeing what the server had imported: that
    takes it a second.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit((code if isinstance(code, int) else int(code is not None)) & 0xFF)


if __name__ == "__main__":
    own_path = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # or every collection of a forked process would look at, and so copy, what was imported
    gc.freeze()
    wanted = serve()
    if wanted is not None:
        status: object = None
        try:
            become(wanted, own_path)
        except SystemExit as exit_:
            status = exit_.code
        end(status)
