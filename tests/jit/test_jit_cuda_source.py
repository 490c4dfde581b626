"""CUDA sources with the real nvcc, cross-compiled for sm_90a, on a machine that need not have a
GPU.
"""

import json
import shutil
from pathlib import Path

import processes
import pytest
from kernels.ptxas_report import SpillError, require_no_spills, resource_usage
from racers import NOT_RUN

from sonicmoe.jit import CompileCache, no_compile
from sonicmoe.jit import toolchain as toolchain_module
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.errors import CompileError, ToolchainError
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels import cuda_sources, peer_rows_source

pytestmark = pytest.mark.skipif(find_toolkit() is None, reason=f"{NOT_RUN}needs nvcc")
DIMENSIONS = ["--E", "8", "--H", "256", "--I", "128"]
ENGINE = "reference"  # whose plan has CUDA sources only: these, and `flush`
LARGE = *cuda_sources("sm_90a"), peer_rows_source("sm_90a")
# Every thread keeps 96 values alive across a barrier, and a block of 1024 leaves it 64 registers to
# keep them in.
SPILLING = """\
__global__ void __launch_bounds__(1024) hungry(float* x) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = v[i] * v[(i + 1) % 96];
}
"""


def command(*arguments, **env):
    # The machine's own node-local cache may be warm.
    env.setdefault(
        "SONIC_MOE_LOCAL_CACHE_DIR", f"{arguments[arguments.index('--cache-dir') + 1]}-local"
    )
    line = ["-m", "sonicmoe.cli.warmup", *DIMENSIONS, "--json", *arguments]
    return processes.of_checkout(*line, **{"SONIC_MOE_ENGINE": ENGINE, **env})


def toolchain_probe(threads=256):
    """`scale_add(x, y, a)`: y = a * x + y on fp32 vectors; `threads()`: its block size."""
    source = processes.ROOT / "benchmarks" / "toolchain_probe.cu"
    return CudaSource.make("toolchain_probe", source, defines={"THREADS": threads}, arch="sm_90a")


def copy_files(artefact, folder):
    for name in artefact.manifest["files"]:
        shutil.copyfile(artefact.file(name), folder / name)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, artefacts):
    """A cache directory that held the large kernels and the probe, and was completed by the command."""
    root = tmp_path_factory.mktemp("warmed")
    for source in (*LARGE, toolchain_probe()):
        made = source.compile(artefacts)
        CompileCache(root, root / "local").build(
            source.key(), lambda folder, made=made: copy_files(made, folder)
        )
    done = command("--cache-dir", str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    states = {kernel["kernel"]: kernel["state"] for kernel in report["kernels"]}
    assert report["complete"]
    assert states == {"flush": "built"} | {source.name: "cached" for source in LARGE}
    assert json.loads(Path(report["record"]).read_text())["model"]["E"] == 8
    return root


@pytest.fixture
def warm_cache(warmed, tmp_path):
    return CompileCache(warmed, tmp_path / "local")


def test_cold_directory_under_forbid_compile_is_one_line(tmp_path):
    done = command("--cache-dir", str(tmp_path), SONIC_MOE_FORBID_COMPILE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: SONIC_MOE_FORBID_COMPILE=1 is in force")
    assert "a compile is needed: " in done.stderr and "Traceback" not in done.stderr


def test_module_loads_without_a_gpu_and_checks_its_arguments(warm_cache):
    torch = pytest.importorskip("torch")
    with no_compile():
        module = toolchain_probe().load(warm_cache)
    assert module.threads() == 256
    assert toolchain_probe().load(warm_cache) is module
    with pytest.raises(RuntimeError, match="x must be on a CUDA device"):
        module.scale_add(torch.zeros(3), torch.zeros(3), 1.0)


def test_spilling_kernel_is_found_out(tmp_path):
    source = tmp_path / "hungry.cu"
    source.write_text(SPILLING)
    cache = CompileCache(tmp_path / "cache", tmp_path / "local")
    usage = resource_usage(CudaSource.make("hungry", source, arch="sm_90a").compile(cache))
    assert usage[0].spills and usage[0].registers <= 64
    with pytest.raises(SpillError, match=r"hungry.*spills"):
        require_no_spills(usage)


def test_compile_error_ends_with_the_compilers_words(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("int f() { return undefined; }\n")
    cache = CompileCache(tmp_path / "cache", tmp_path / "local")
    with pytest.raises(CompileError, match=r"broken did not compile[\s\S]*broken\.cu\(1\)"):
        CudaSource.make("broken", source, arch="sm_90a").compile(cache)
    assert list((tmp_path / "cache" / "staging").iterdir()) == []


def test_key_follows_macros_flags_sources_and_nothing_else(tmp_path):
    header, source = tmp_path / "tile.cuh", tmp_path / "k.cu"
    header.write_text("#define TILE 128\n")
    source.write_text('#include "tile.cuh"\n')

    def digest(**changes):
        source_of = {"arch": "sm_90a", "defines": {"E": 8}, **changes}
        return CudaSource.make("k", source, **source_of).key().digest

    base = digest()
    assert digest() == base
    variants = [digest(defines={"E": 16}), digest(flags=("-G",)), digest(arch="sm_100a")]
    header.write_text("#define TILE 256\n")
    assert len({base, digest(), *variants}) == 5


def test_without_a_toolkit_the_warmed_artefact_loads_and_nothing_builds(monkeypatch, warm_cache):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain_module, "_PREFIXES", ())
    assert find_toolkit() is None and toolchain_probe().key().toolchain is None
    assert toolchain_probe().load(warm_cache).threads() == 256
    with pytest.raises(ToolchainError, match="CUDA_HOME"):
        toolchain_probe(threads=128).load(warm_cache)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_home_without_a_compiler_is_said(variable, monkeypatch, tmp_path, caplog):
    """It was ignored in silence, and another version compiled."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = find_toolkit()
    monkeypatch.setenv(variable, str(tmp_path))
    assert find_toolkit() == found
    (line,) = caplog.messages
    assert f" is {tmp_path}, which has no nvcc that answers; that of {found.home} compiles" in line
    caplog.clear()
    monkeypatch.setenv(variable, str(found.home))
    assert find_toolkit() == found and caplog.messages == []
