"""What a compile of a Triton kernel gave, without the GPU that it is for."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from triton import knobs

from sonicmoe.jit.cache import CompileCache
from sonicmoe.kernels.triton.tilings import PRODUCTS

# What ptxas may keep in local memory, in bytes, by kernel and architecture.
ALLOWED = {("triton_dgated", "sm_90a"): 16}  # of relu (16) and silu (8); gated ones have none
SHARED_KB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227}  # of a block, at most
INSTRUCTION = {"sm_90a": "wgmma.mma_async"}


@dataclass(frozen=True)
class Compiled:
    """spilled: bytes of local memory of a thread; shared: bytes of shared memory of a block."""

    ptx: str
    registers: int
    spilled: int
    shared: int


def compiled(job: Any, cache: CompileCache) -> Compiled:
    """A job, compiled where `cache` does not have it."""
    folder = job._request().compile(cache).path
    (cubin,) = folder.glob("*.cubin")
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    report = subprocess.run(command, check=True, capture_output=True, text=True)
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report.stdout + report.stderr
    )
    assert usage, report
    registers, stack, local = map(int, usage.groups())
    (ptx,) = folder.glob("*.ptx")
    metadata = folder / f"{ptx.stem}.json"
    shared = json.loads(metadata.read_text(encoding="utf-8"))["shared"]
    return Compiled(ptx.read_text(encoding="utf-8"), registers, stack + local, shared)


def problems(job: Any, found: Compiled) -> list[str]:
    """What the gate refuses, in words."""
    wrong = []
    if f".target {job.arch}" not in found.ptx:
        wrong.append(f"the PTX is not for {job.arch}")
    if found.spilled > ALLOWED.get((job.name, job.arch), 0):
        wrong.append(f"spills {found.spilled} bytes")
    if found.shared > SHARED_KB[job.arch] * 1024:
        wrong.append(f"takes {found.shared} bytes of shared memory")
    if job.name.removeprefix("triton_") in PRODUCTS:
        if INSTRUCTION.get(job.arch, "mma.sync") not in found.ptx:
            wrong.append("multiplies with another instruction")
        # 16 bytes at a time: an address whose alignment the compiler lost is loaded in parts.
        if "cp.async.cg.shared.global" not in found.ptx:
            wrong.append("loads no 16 bytes at a time")
    return wrong
