"""What this host has: its memory, and its GPUs, asked through a library with NVML's own signatures;
what warm-up compiles for where nobody names an architecture.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import sonicmoe.cli.warmup as warmup_module
import sonicmoe.jit_warmup as jit_warmup_module
from sonicmoe import host
from sonicmoe.architectures import DEFAULT_ARCH, chosen_arch
from sonicmoe.cli.main import main
from sonicmoe.errors import ConfigError
from sonicmoe.host import capabilities_of_host, require_memory
from sonicmoe.jit_warmup import warmup_jit

SIZES = ["--E", "8", "--H", "3072", "--I", "1536"]

FAKE = r"""
static int gpus[COUNT + 1], users;
static const int majors[] = {MAJORS, 0}, minors[] = {MINORS, 0};
int nvmlInit_v2(void) { users++; return FAILS; }
int nvmlShutdown(void) { users--; return 0; }
int fake_users(void) { return users; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = &gpus[index];
    return index == LOST ? 15 : 0;
}
#ifndef OLD
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    long index = (int *)gpu - gpus;
    *major = majors[index];
    *minor = minors[index];
    return 0;
}
#endif
"""


@pytest.fixture
def library(tmp_path: Path) -> Callable[..., str]:
    """Builds an NVML of GPUs with these capabilities and returns its path."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc")

    def build(*capabilities: tuple[int, int], **macros: int) -> str:
        majors, minors = (",".join(str(pair[at]) for pair in capabilities) or "0" for at in (0, 1))
        values = {"COUNT": len(capabilities), "MAJORS": majors, "MINORS": minors}
        values |= {"FAILS": 0, "LOST": -1} | macros
        path = tmp_path / f"libnvidia-ml-{len(list(tmp_path.iterdir()))}.so.1"
        command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
        command += [f"-D{name}={value}" for name, value in values.items()]
        subprocess.run(command, input=FAKE, text=True, check=True)
        return str(path)

    return build


def test_every_gpu_of_the_host_is_asked(library: Callable[..., str], tmp_path: Path) -> None:
    path = library((9, 0), (12, 0))
    assert capabilities_of_host(path) == ((9, 0), (12, 0))
    assert ctypes.CDLL(path).fake_users() == 0, "NVML is closed again"
    assert capabilities_of_host(library((9, 0), (9, 0), (9, 0), LOST=1)) == ((9, 0), (9, 0))
    # A host without an answer has none.
    assert capabilities_of_host(str(tmp_path / "absent.so")) == ()
    assert capabilities_of_host(library()) == ()
    assert capabilities_of_host(library((9, 0), FAILS=9)) == ()
    assert capabilities_of_host(library((9, 0), OLD=1)) == ()


def test_gpus_of_one_architecture_or_a_named_one_that_something_runs_on_decide() -> None:
    assert chosen_arch(None, ()) == DEFAULT_ARCH
    assert chosen_arch(None, [(10, 3), (10, 3)]) == "sm_103a"
    with pytest.raises(ConfigError, match="GPUs of sm_120a and sm_90a; needed: one of them"):
        chosen_arch(None, [(9, 0), (12, 0)])
    assert chosen_arch("sm_90a", [(10, 0)]) == "sm_90a"
    assert chosen_arch("sm_75", [(7, 5)]) == "sm_75"  # of this host, in no table
    with pytest.raises(
        ConfigError, match=r"^arch is 'sm_90'; did you mean 'sm_90a'\?; needed: one"
    ):
        chosen_arch("sm_90", [(9, 0)])
    for other in ("sm_75", "sm_70", "hopper"):  # a number is a name of its own
        with pytest.raises(ConfigError, match=rf"^arch is '{other}'; needed: one"):
            chosen_arch(other, ())
    with pytest.raises(ConfigError, match=r"^arch is ''; needed: one of \['sm_80', .*'sm_121a'\]$"):
        chosen_arch("", ())


def test_a_misspelt_architecture_warms_nothing(tmp_path: Path) -> None:
    """It used to compile the few kernels of every run, for a GPU that nobody has, and end well."""
    words = ["warmup", *SIZES, "--cache-dir", str(tmp_path), "--arch", "sm_90"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2 and "did you mean 'sm_90a'?" in refused.output
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="did you mean 'sm_90a'"):
        warmup_jit(8, 3072, 1536, arch="sm_90", cache_dir=tmp_path)


def test_a_warm_up_without_an_architecture_follows_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the command and from a program; one that is named decides, and a CPU asks nobody."""

    def asked(*options: str) -> dict:
        words = ["warmup", *SIZES, "--cache-dir", str(tmp_path), "--check", "--json", *options]
        result = CliRunner().invoke(main, words)
        return json.loads(result.stdout)

    seen = []
    for module in (warmup_module, jit_warmup_module):
        monkeypatch.setattr(module, "capabilities_of_host", lambda: ((10, 0),))
    monkeypatch.setattr(
        jit_warmup_module,
        "warm_up",
        lambda spec, *_, **__: seen.append(spec.arch) or SimpleNamespace(kernels=()),
    )
    found = asked()
    assert found["model"]["arch"] == "sm_100a"
    assert asked("--arch", "sm_90a")["model"]["arch"] == "sm_90a"
    warmup_jit(8, 3072, 1536)
    warmup_jit(8, 3072, 1536, arch="sm_90a")
    warmup_jit(8, 3072, 1536, device="cpu")
    assert seen == ["sm_100a", "sm_90a", DEFAULT_ARCH]


def test_a_container_lowers_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_LIMITS", (limit, tmp_path / "none"))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.host_memory() == whole
    for text, wanted in (("max", whole), ("1048576\n", 1 << 20), ("9" * 30, whole)):
        limit.write_text(text)
        assert host.host_memory() == wanted


def test_the_refusal_names_purpose_estimate_and_what_is_there() -> None:
    require_memory(1 << 30, "a model", available=1 << 30)
    wanted = "a model needs at least 1.5 GiB of memory, and this machine has 1.0 GiB"
    with pytest.raises(ConfigError, match=wanted):
        require_memory(3 << 29, "a model", available=1 << 30)
