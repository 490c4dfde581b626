"""The Triton engine on the GPU: the contract of the plain engines, the tiles of every architecture, and
code that was compiled for sm_80.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gpu.device import fill_free_memory
from gpu.engine_cases import (
    ARCH,
    BF16,
    FP16,
    SWIGLU,
    H,
    I,
    assert_same_bits,
    build,
    check,
    kernels_of_the_contract,
    make_case,
)
from gpu.engine_cases import run as run_on
from gpu.engine_contract import PlainEngineContract
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from sonicmoe.engine import triton as triton_engine
from sonicmoe.engine.gpu import gpu_of
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.triton import TritonEngine, index_of
from sonicmoe.enums import ActivationType
from sonicmoe.jit import no_compile, triton_kernel
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.triton import gemms, launches, rows
from sonicmoe.kernels.triton.tilings import TILINGS
from sonicmoe.kernels.triton.variants import ExpertShape, all_variants

pytestmark = pytest.mark.gpu

OURS = TritonEngine()
GEMMS = ("up", "rows_product", "dgated", "wgrad")
KERNELS = (
    *(gemms.up, gemms.rows_product, gemms.dgated, gemms.wgrad),
    *(rows.index_rows, rows.row_sums, rows.column_sums, rows.write_addresses),
)


def run(case, **options):
    return run_on(case, OURS, **options)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every variant of this module, built in parallel; nothing below may compile unless it says
    so.
    """
    build([*cuda_sources(ARCH), *kernels_of_the_contract(ExpertShape, all_variants)])


@pytest.fixture
def may_compile():
    """What a test asks for that runs variants of its own."""


@pytest.fixture(autouse=True)
def compiles_nothing(request):
    if "may_compile" in request.fixturenames:
        yield
        return
    with no_compile():
        yield


class TestTritonEngine(PlainEngineContract):
    """In the tiles of this GPU."""

    engine = OURS

    def rows_of(self, routing):
        """Looks at the experts of the tiles, too; tiles behind those in use are nobody's."""
        found = index_of(launches.Calls(ExpertShape(H, I, SWIGLU, arch=ARCH)), routing)
        offsets = routing.padded_offsets
        if offsets[-1] <= routing.num_rows:
            wanted = torch.arange(len(offsets) - 1, device="cuda")
            wanted = wanted.repeat_interleave(offsets.diff() // 128).tolist()
            assert found.tile_expert.tolist()[: len(wanted)] == wanted
        return found.cu_rows, found.index


# ---- other code ----


@pytest.mark.parametrize("arch", TILINGS)
def test_tiles_of_every_architecture(arch, monkeypatch, may_compile):
    """Compiled for this GPU in the tiles of another one."""
    use_tiles_of(arch, monkeypatch)
    check(make_case(seed=1), OURS)


def use_tiles_of(arch, monkeypatch):
    gpu = gpu_of("cuda:0")._replace(arch=arch)
    monkeypatch.setattr(triton_engine, "gpu_of", lambda device: gpu)


@pytest.fixture
def code_of_ampere(monkeypatch, tmp_path, may_compile):
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


@pytest.mark.parametrize(
    ("activation", "dtype", "bias"),
    [
        (SWIGLU, BF16, True),
        (ActivationType.GELU, FP16, False),
        (ActivationType.SITU_GLU, BF16, False),
    ],
    ids=["swiglu bf16 bias", "gelu fp16", "situ_glu bf16"],
)
def test_the_code_for_ampere(activation, dtype, bias, code_of_ampere):
    case = make_case(activation=activation, dtype=dtype, bias=bias)
    check(case, OURS, got=(first := run(case)))
    assert_same_bits(run(case), first)
    fill_free_memory(0xFF)
    assert_same_bits(run(case), first)
    again = run(case, settings=EngineSettings(activation, recompute_z=True))
    assert_same_bits(again, first)
    assert all(".target sm_80" in ptx for ptx in code_of_ampere.values())
    products = [ptx for name, ptx in code_of_ampere.items() if name.split()[0] in GEMMS]
    assert len(products) >= 6
    assert all("mma.sync" in ptx and "cp.async" in ptx and "wgmma" not in ptx for ptx in products)
