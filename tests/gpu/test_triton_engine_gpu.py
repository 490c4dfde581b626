"""The Triton engine on the GPU: the tiles of every architecture, and code that was compiled for sm_80.
Whole layers have test_oracle_gpu.py.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gpu.engine_cases import check, make_case, run
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.engine import triton as triton_engine
from sonicmoe.engine.gpu import gpu_of
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.triton import TritonEngine
from sonicmoe.jit import triton_kernel
from sonicmoe.kernels.triton import gemms, rows
from sonicmoe.kernels.triton.tilings import TILINGS

pytestmark = pytest.mark.gpu

OURS = TritonEngine()
GEMMS = ("up", "rows_product", "dgated", "wgrad")
KERNELS = (
    *(gemms.up, gemms.rows_product, gemms.dgated, gemms.wgrad),
    *(rows.index_rows, rows.row_sums, rows.column_sums, rows.write_addresses),
)


def test_tiles_of_little_shared_memory(monkeypatch):
    """Compiled for this GPU in the tiles of another one."""
    assert TILINGS["sm_86"] == TILINGS["sm_89"], "test those of the other one, too"
    use_tiles_of("sm_86", monkeypatch)
    check(make_case(seed=1), OURS)


def use_tiles_of(arch, monkeypatch):
    gpu = gpu_of("cuda:0")._replace(arch=arch)
    monkeypatch.setattr(triton_engine, "gpu_of", lambda device: gpu)


@pytest.fixture
def code_of_ampere(monkeypatch, tmp_path):
    """Kernels are compiled for sm_80, and their PTX, which is mma.sync and cp.async, is assembled
    for this GPU. Returns the PTX of every kernel that ran.
    """
    seen = {}

    def compile_for_ampere(source, target=None, options=None, _env_vars=None):
        options = {**options, "arch": "sm80"}
        request = triton_kernel.TritonCompile(source, GPUTarget("cuda", 80, 32), options, _env_vars)
        artefact = request.compile()
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        files = {}
        for name in artefact.manifest["files"]:
            files[name] = str(shutil.copy(artefact.file(name), folder / name))
        ptx = Path(next(path for name, path in files.items() if name.endswith(".ptx")))
        cubin = next(path for name, path in files.items() if name.endswith(".cubin"))
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", str(ptx), "-o", cubin]
        subprocess.run(command, check=True, capture_output=True)
        seen[f"{source.name} {len(seen)}"] = ptx.read_text(encoding="utf-8")
        return CompiledKernel(source, files, request._hash)

    monkeypatch.setattr(triton_kernel, "compile_stored", compile_for_ampere)
    use_tiles_of("sm_80", monkeypatch)
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield seen
    for kernel in KERNELS:
        kernel.device_caches.clear()


def test_the_code_for_ampere(code_of_ampere):
    case = make_case(bias=True)
    check(case, OURS, got=(first := run(case, OURS)))
    with memory_full_of_nan("cuda"):
        again = run(case, OURS, EngineSettings(recompute_z=True))
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert all(".target sm_80" in ptx for ptx in code_of_ampere.values())
    products = [ptx for name, ptx in code_of_ampere.items() if name.split()[0] in GEMMS]
    assert len(products) >= 6
    assert all("mma.sync" in ptx and "cp.async" in ptx and "wgmma" not in ptx for ptx in products)
