"""The packages that this environment lacks for the GPU engines: `python tools/ci/gpu_engines.py` names
them where there is a GPU.

Reads package metadata; imports no framework.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sonicmoe.engine.capabilities import RECORDS
from sonicmoe.host import gpu_present, install_hint
from sonicmoe.jit.key import package_versions
from sonicmoe.jit.toolchain import find_toolkit


def lacking() -> list[str]:
    """Missing parts, in words; empty where FP8 and BF16 kernels can be compiled, loaded and run."""
    needed = _needed_by()
    absent = [name for name, found in package_versions(*needed) if found == "absent"]
    missing = [f"{name} (for {' and '.join(needed[name])})" for name in absent]
    if find_toolkit() is None:
        missing.append("nvcc, to compile (a warm cache does without)")
    return [*missing, *_cpu_builds()]


def report() -> str | None:
    """One line for the end of an installation; None without a GPU."""
    if not gpu_present():
        return None
    missing = lacking()
    if not missing:
        return "a GPU is here, and nothing that the GPU engines need is missing"
    remedy = f"Paddle: {install_hint('paddle')}; PyTorch: {install_hint('torch')}"
    return f"a GPU is here, and the GPU engines lack: {', '.join(missing)}. {remedy}"


def _needed_by() -> dict[str, list[str]]:
    """The engines by each package that loads or compiles their kernels."""
    needed: dict[str, list[str]] = {}
    for name, record in RECORDS.items():
        if record.by_name_only:  # whoever asks for it is told by the choice of the engine
            continue
        for package in filter(None, [record.loads_with, *dict(record.packages)]):
            needed.setdefault(package, []).append(name.value)
    return needed


def _cpu_builds() -> list[str]:
    """The installed frameworks, where all of them are CPU builds."""
    torch, paddle, paddle_gpu = (
        _version(name) for name in ("torch", "paddlepaddle", "paddlepaddle-gpu")
    )
    # PyTorch names its CPU build in the version; Paddle's CUDA build is a distribution of its own.
    if paddle_gpu or (torch and "+cpu" not in torch):
        return []
    found = [
        f"{name} {text}" for name, text in (("torch", torch), ("paddlepaddle", paddle)) if text
    ]
    return [f"a framework built for CUDA (here: {', '.join(found) or 'none'})"]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    line = report()
    if line:
        print(line)
