"""The process that forks for CuTe kernels: what comes back, and what a worker does without it."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from worlds import ROOT

from sonicmoe.jit import cute_kernel, cute_server
from sonicmoe.jit.cute_kernel import CuteKernel
from sonicmoe.jit.errors import CompileError
from sonicmoe.jit.toolchain import CudaToolkit

SERVER = """
import json, os, sys
from pathlib import Path
from sonicmoe.jit import cute_build, cute_server

def main(path):
    request = json.loads(Path(path).read_text())
    print("building", request["name"], "in", os.getcwd(), flush=True)
    if request["name"] == "killed":
        os.kill(os.getpid(), 9)
    if request["name"] == "raises":
        raise LookupError("no such kernel")
    Path(request["name"] + ".so").write_text(str(os.getppid()))
    print("by compilers", file=sys.stderr)
    return 3 if request["name"] == "refused" else 0

cute_build.main, cute_build.leave_out_graph_compilers = main, lambda: None
cute_server._IMPORTS = ()
cute_server.serve("sm_90a")
"""


@pytest.fixture
def server():
    """`(process, descriptor)` of a server whose compiler is a few lines."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        ours,
        subprocess.Popen([sys.executable, "-c", SERVER], stdin=theirs, env=environment) as it,
    ):
        theirs.close()
        yield it, ours.fileno()
        ours.close()
        assert it.wait(20) in (0, -signal.SIGKILL), "it ends when nobody can send a request"


def request(folder, name):
    folder.mkdir()
    path = folder / "request.json"
    path.write_text(f'{{"name": "{name}"}}', encoding="utf-8")
    return path


def test_every_request_is_answered_by_a_fork_of_one_process(server, tmp_path):
    process, descriptor = server
    names = [f"kernel{i}" for i in range(6)]
    paths = [request(tmp_path / name, name) for name in names]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda path: cute_server.build(descriptor, path, 0o077), paths))
    for name, path, answer in zip(names, paths, answers, strict=True):
        built = path.with_name(f"{name}.so")
        assert answer == (0, f"building {name} in {path.parent}\nby compilers\n")
        assert built.read_text() == str(process.pid) and built.stat().st_mode & 0o777 == 0o600


def test_failures_come_back_with_their_output(server, tmp_path):
    _, descriptor = server
    status, output = cute_server.build(descriptor, request(tmp_path / "a", "refused"), -1)
    assert status == 3 and output.endswith("by compilers\n")
    status, output = cute_server.build(descriptor, request(tmp_path / "b", "raises"), -1)
    assert status == 1 and "LookupError: no such kernel" in output
    # No status: the worker builds by itself, and that process's end is reported.
    assert cute_server.build(descriptor, request(tmp_path / "c", "killed"), -1) is None
    assert cute_server.build(descriptor, request(tmp_path / "d", "after"), -1)[0] == 0


def test_without_a_server_the_worker_builds_by_itself(server, tmp_path, monkeypatch):
    process, descriptor = server
    process.kill()
    process.wait()
    assert cute_server.build(descriptor, request(tmp_path / "a", "any"), -1) is None
    kernel = CuteKernel.make("mine", "package.module:function", {}, arch="sm_90a")
    monkeypatch.setattr(cute_kernel, "server_descriptor", descriptor)
    monkeypatch.setattr(cute_kernel, "run_build_script", lambda *given: given[0])
    toolkit = CudaToolkit(tmp_path, tmp_path / "nvcc", "13.0")
    assert kernel._build(tmp_path, toolkit) == "mine"
    monkeypatch.setattr(cute_server, "build", lambda *_: (1, "error: no such thing"))
    with pytest.raises(CompileError, match=r"mine did not compile \(exit status 1\)(.|\n)*no such"):
        kernel._build(tmp_path, toolkit)
