"""The wheel has every module and kernel source of the two packages, and the kernels it was built
with. Installed, it loads them where no compiler is, and names what it does not have.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from types import ModuleType

import processes
import pytest
from processes import ROOT

from sonicmoe.enums import ActivationType
from sonicmoe.jit import CompileCache
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels import routing_metadata_source

PACKAGES = ("sonicmoe", "ernie_compat")
KERNEL = "routing_metadata"
CARRIED = Path("sonicmoe") / "carried"
# What a user sees who has neither nvcc nor quack nor CuTe DSL; a line for each question.
PROGRAM = """\
import sys
sys.modules.update(quack=None, cutlass=None)
from sonicmoe.diagnostics.doctor import Report, examine_carried
from sonicmoe.engine.capabilities import HOPPER, missing_tool
from sonicmoe.jit import toolchain
from sonicmoe.jit.cache import default_cache
from sonicmoe.jit.errors import ToolchainError
from sonicmoe.kernels import aggregate_source, routing_metadata_source
toolchain._PREFIXES = ()
source, cache = routing_metadata_source("sm_90a"), default_cache()
assert source.key().toolchain is None and cache.share(source.key()).path.name == source.key().family
print(source.load().max_experts())
for other in (aggregate_source("sm_90a"), routing_metadata_source("sm_100a")):
    try:
        other.load()
    except ToolchainError as error:
        print(error)
print(missing_tool(HOPPER, None, "sm_90a"))
examine_carried(report := Report())
print(*report.carried, len(report.problems))
assert not cache.root.exists() and not cache.local_root.exists()
"""

# As Hugging Face's `kernels` imports a variant: under the name of its build, from its own path.
OF_THE_HUB = """\
import importlib, importlib.util, json, pathlib, sys
variant = pathlib.Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(f"{name}.jit.toolchain")._PREFIXES = ()
source = importlib.import_module(f"{name}.kernels").routing_metadata_source("sm_90a")
assert source.load().max_experts() > 128 and package.MoE
print([module for module in sys.modules if module.startswith("sonicmoe")])
"""


def files_of(tree: Path) -> set[str]:
    found = (path for package in PACKAGES for path in (tree / package).rglob("*"))
    return {
        str(path.relative_to(tree))
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, artefacts: CompileCache) -> Path:
    """A wheel with one kernel, or with none where no compiler is, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    if find_toolkit() is not None:
        routing_metadata_source("sm_90a").compile(artefacts)
    kernel = KERNEL if find_toolkit() is not None else "none"
    places = ("--work", folder / "work", "--cache", artefacts.root, "--out", folder / "out")
    done = processes.of_checkout("tools/build_wheel.py", "--kernel", kernel, *places)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "out").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_what_a_user_runs_is_installed(installed: Path) -> None:
    own = {name for name in files_of(installed) if not Path(name).is_relative_to(CARRIED)}
    assert own == files_of(ROOT)
    (metadata,) = installed.glob("sonicmoe-*.dist-info/METADATA")
    assert "Requires-Dist: apache-tvm-ffi==" in metadata.read_text()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return processes.program("build_wheel.py")


def test_the_page_counts_what_is_inside(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    counts = [int(text) for text in re.findall(r"^\|.*\| (\d+) \|$", page, re.M)]
    jobs, _, left_out = tool.plan(list(tool.PARTS), list(ActivationType))
    assert sum(counts) == len(jobs) and f"All {len(jobs)} kernels" in " ".join(page.split())
    assert left_out == ["adapters (LoRA)"]


@pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
def test_a_library_needs_nothing_of_cuda(installed: Path, tool: ModuleType) -> None:
    """It would need the version that it was linked with, and a framework brings its own."""
    (library,) = (installed / CARRIED).rglob("*.so")
    needed, glibc = tool.dynamic(library)
    assert "libtvm_ffi.so" in needed and needed <= tool.MAY_NEED and glibc >= (2, 17)
    assert not any("cuda" in name for name in tool.MAY_NEED)


@pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
def test_it_computes_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("CUDA")}
    env |= {"PATH": "/nonexistent", "PYTHONPATH": str(installed)}
    env |= {"SONIC_MOE_CACHE_DIR": str(tmp_path / "c"), "SONIC_MOE_LOCAL_CACHE_DIR": str(tmp_path / "l")}  # fmt: skip
    done = processes.run(("-c", PROGRAM), env, tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    experts, no_kernel, no_arch, no_engine, told = done.stdout.splitlines()
    assert int(experts) > 128
    assert "aggregate" in no_kernel and "It is not among the kernels of this package" in no_kernel
    assert "for sm_90a: install a CUDA toolkit for sm_100a." in no_arch
    assert no_engine.endswith("install a CUDA toolkit")
    assert told.startswith("1 kernels for sm_90a by nvcc") and told.endswith("0")


@pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
def test_the_folder_for_the_hub_loads_under_its_own_name(installed: Path, tmp_path: Path) -> None:
    (variant,) = (installed.parent / "out" / "kernels" / "build").iterdir()
    assert re.fullmatch(r"tvm-ffi\d+-cu\d+-x86_64-linux", variant.name)
    env = {"PATH": "/nonexistent", "SONIC_MOE_CACHE_DIR": str(tmp_path / "c")}
    done = processes.run(("-P", "-c", OF_THE_HUB, variant), env, tmp_path, timeout=120)
    assert done.stdout == "[]\n", done.stderr
