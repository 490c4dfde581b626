"""Triton kernels in the package's cache, compiled for a GPU that is not there."""

import os

import pytest
from racers import NOT_RUN

from sonicmoe import SonicMoEConfig
from sonicmoe.jit import default_cache, no_compile
from sonicmoe.jit.errors import CompileError, CompileForbiddenError
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.triton_variant import TritonVariant
from sonicmoe.jit.warmup import warm_up

triton = pytest.importorskip("triton", reason=f"{NOT_RUN}needs triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(f"{NOT_RUN}TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

import triton_sample  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas_version  # noqa: E402

VARIANT = TritonVariant.make("scale_add", "triton_sample:scale_add_for", {"block": 256}, "sm_90a")


class AbsentGPU:
    """Stands in for the driver up to the point of the launch."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache directory filled by worker processes."""
    root = tmp_path_factory.mktemp("triton")
    with SonicMoEConfig(cache_dir=root / "cache", local_cache_dir=root / "local").activate():
        report = warm_up(ModelSpec(8, 64, 64), default_cache(), compile_jobs=[VARIANT])
    assert report.complete, report.kernels[0].message
    return root


@pytest.fixture
def launches(warmed):
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(AbsentGPU())
    triton_sample.scale_add.device_caches.clear()
    with SonicMoEConfig(cache_dir=warmed / "cache", local_cache_dir=warmed / "local").activate():
        yield
    driver._active = before


def launch(num_tokens, block=256, kernel=triton_sample.scale_add):
    pointer = triton.runtime.jit.MockTensor(tl.float32)
    return kernel.run(pointer, pointer, 3.0, num_tokens, BLOCK=block, grid=(1,), warmup=True)


def test_warmed_kernel_is_what_a_launch_looks_for_at_any_token_count(launches):
    with no_compile():
        kernels = {id(launch(count)) for count in (0, 1, 15, 16, 1000, 65536)}
    assert len(kernels) == 1


def test_cold_variant_raises_under_no_compile(launches):
    with (
        no_compile(),
        pytest.raises(CompileForbiddenError, match=r"triton_scale_add\[triton=.*arch=sm_90a\]"),
    ):
        launch(1000, block=512)


@pytest.fixture
def named_assembler(launches, monkeypatch, tmp_path):
    """A function that has TRITON_PTXAS_PATH name an assembler, and returns its path. The assembler
    knows its version and assembles nothing. The cache is empty.
    """

    def name(*parts):
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 99.9,"\n')
        path.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        get_ptxas_version.cache_clear()
        return str(path)

    with SonicMoEConfig(cache_dir=tmp_path / "empty", local_cache_dir=tmp_path).activate():
        yield name
    get_ptxas_version.cache_clear()


def test_the_assembler_that_inductor_names_is_not_taken(named_assembler):
    """A child would look for other keys than its parent, and training for others than its warm-up,
    because Triton asks for its assembler's version once a process.
    """
    key = VARIANT.key()
    path = named_assembler("torch", "bin", "ptxas")
    assert VARIANT.key() == key
    launch(1000)
    assert default_cache().try_load(key) is not None
    assert os.environ["TRITON_PTXAS_PATH"] == path and triton.knobs.nvidia.ptxas.path == path


def test_the_assembler_that_a_user_names_is_taken(named_assembler):
    key = VARIANT.key()
    named_assembler("ptxas")
    assert VARIANT.key() != key
    with pytest.raises(CompileError):
        VARIANT.compile(default_cache())


def test_artefact_is_complete_and_for_the_architecture(warmed):
    (artefact,) = (warmed / "cache" / "artefacts" / "triton_scale_add").iterdir()
    found = {path.name for path in artefact.iterdir()}
    assert {"scale_add.cubin", "scale_add.json", "scale_add.ptx", "manifest.json"} <= found
    assert ".target sm_90a" in (artefact / "scale_add.ptx").read_text()


def test_other_triton_users_keep_their_cache(launches, warmed, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = sorted(path.name for path in (warmed / "cache" / "artefacts").iterdir())
    launch(1000, kernel=triton.jit(triton_sample.scale_add.fn, do_not_specialize=["num_tokens"]))
    assert sorted(path.name for path in (warmed / "cache" / "artefacts").iterdir()) == before
    assert list(tmp_path.rglob("*.cubin")) != []
