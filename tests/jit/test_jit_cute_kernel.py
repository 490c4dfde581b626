"""CuTe DSL kernels compiled ahead of time for sm_90a, loaded without CuTe DSL."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import processes
import pytest
from racers import NOT_RUN, PACKAGE_ROOT, TIMEOUT_S, environment

from sonicmoe.jit import CompileCache
from sonicmoe.jit.errors import ToolchainError
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel

SAMPLE = Path(__file__).with_name("cute_sample.py")
HAS_CUTE = importlib.util.find_spec("cutlass") is not None and find_toolkit() is not None
needs_cute = pytest.mark.skipif(not HAS_CUTE, reason=f"{NOT_RUN}needs nvidia-cutlass-dsl and nvcc")


def sample(threads=128, source=SAMPLE):
    entry, statics = "cute_sample:compile_scale_add", {"threads": threads}
    return CuteKernel.make("scale_add", entry, statics, source, arch="sm_90a")


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("cute")
    cache = CompileCache(root / "cache", root / "local")
    sample().compile(cache)
    return cache


@needs_cute
def test_artefact_loads_without_cute(warmed):
    program = (
        "import sys; sys.modules['cutlass'] = None\n"
        "from pathlib import Path; from sonicmoe.jit import CompileCache, no_compile\n"
        "from test_jit_cute_kernel import sample\n"
        "import json, torch\n"
        f"cache = CompileCache(Path({str(warmed.root)!r}), Path({str(warmed.local_root)!r}))\n"
        "with no_compile(): function = sample().load(cache)\n"
        "try: function(torch.zeros(3), torch.zeros(3), 1.0)\n"
        "except ValueError as error: print(json.dumps(str(error)))"
    )
    env = environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = processes.run(["-c", program], env, PACKAGE_ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "expected device_type=cuda" in json.loads(done.stdout)


@pytest.mark.skipif(HAS_CUTE, reason="CuTe DSL is installed")
def test_without_cute_a_miss_is_explained(tmp_path):
    with pytest.raises(ToolchainError, match=r"scale_add\[.*threads=128.*sonicmoe warmup"):
        sample().load(CompileCache(tmp_path / "cache", tmp_path / "local"))


def test_key_follows_statics_and_source(tmp_path):
    copy = tmp_path / "cute_sample.py"
    copy.write_text(SAMPLE.read_text())
    keys = {sample().key().family, sample(256).key().family}
    moved = sample(source=copy)
    assert moved.key().family in keys
    copy.write_text(SAMPLE.read_text() + "# changed\n")
    assert moved.key().family not in keys
