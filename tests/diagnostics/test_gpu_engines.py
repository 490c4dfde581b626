"""What an installation is told about the GPU engines at its end."""

import importlib.util
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from sonicmoe import host
from sonicmoe.kernels.quack_gemm import PACKAGES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "ci" / "gpu_engines.py"
_SPEC = importlib.util.spec_from_file_location("gpu_engines", TOOL)
assert _SPEC is not None and _SPEC.loader is not None
gpu_engines = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu_engines)
COMPLETE = {"torch": "2.11.0+cu130", "triton": "3.6.0", "apache-tvm-ffi": "0.1", **PACKAGES}


@pytest.fixture
def machine(monkeypatch):
    """`machine(packages, nvcc, gpu)`: what is installed."""

    def make(packages, nvcc=True, gpu=True):
        def version(name):
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        found = lambda *names: [(name, packages.get(name, "absent")) for name in names]  # noqa: E731
        monkeypatch.setattr(gpu_engines, "version", version)
        monkeypatch.setattr(gpu_engines, "package_versions", found)
        toolkit = Path("/usr/local/cuda") if nvcc else None
        monkeypatch.setattr(gpu_engines, "find_toolkit", lambda: toolkit)
        for module in (gpu_engines, host):
            monkeypatch.setattr(module, "gpu_present", lambda: gpu)

    return make


def test_nothing_is_said_without_a_gpu(machine):
    machine({}, nvcc=False, gpu=False)
    assert gpu_engines.report() is None


def test_a_complete_machine(machine):
    machine(COMPLETE)
    assert gpu_engines.lacking() == []
    assert "nothing that the GPU engines need is missing" in (gpu_engines.report() or "")


def test_the_cpu_environment_on_a_machine_with_a_gpu(machine):
    machine({"paddlepaddle": "3.3.1"}, nvcc=False)
    line = gpu_engines.report() or ""
    packages = ["apache-tvm-ffi (for hopper and bf16)", "quack-kernels (for bf16)", "nvcc"]
    for words in (*packages, "paddlepaddle 3.3.1", "not [paddle]"):
        assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(("packages", "lacks"), [
    ({"torch": "2.13.0+cpu"}, True), ({"torch": "2.13.0+cpu", "paddlepaddle-gpu": "3.3.0"}, False), ({}, True),
])  # fmt: skip
def test_cpu_builds_are_recognised(machine, packages, lacks):
    machine({name: text for name, text in COMPLETE.items() if name != "torch"} | packages)
    assert any("a framework built for CUDA" in line for line in gpu_engines.lacking()) is lacks
