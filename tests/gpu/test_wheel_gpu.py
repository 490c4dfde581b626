"""A first FP8 step out of an installed wheel, where nothing may be compiled."""

from __future__ import annotations

import os
import zipfile

import processes
import pytest

from sonicmoe.jit.cache import default_cache
from sonicmoe.jit.child import search_path

pytestmark = pytest.mark.gpu

PROGRAM = """\
import sonicmoe, torch
from sonicmoe import MoE
moe = MoE(8, 2, 1024, 512, "swiglu", False, 0.02).to("cuda", torch.bfloat16)
x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
out, _ = moe(x, use_fp8=True)
out.sum().backward()
assert "site" in sonicmoe.__file__
assert bool(x.grad.isfinite().all()) and bool(moe.c_fc.weight.grad.any())
"""


def test_it_computes_without_a_compiler(tmp_path):
    wanted = ("--part", "fp8", "--activation", "swiglu", "--cache", default_cache().root)
    places = ("--work", tmp_path / "work", "--out", tmp_path / "out")
    done = processes.of_checkout("tools/build_wheel.py", *wanted, *places)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # The checkout is behind the wheel, and what the wheel needs may lie beside Python's own packages.
    path = os.pathsep.join((str(tmp_path / "site"), search_path()))
    env = {**os.environ, "PYTHONPATH": path, "SONIC_MOE_FORBID_COMPILE": "1"}
    env["SONIC_MOE_CACHE_DIR"] = env["SONIC_MOE_LOCAL_CACHE_DIR"] = str(tmp_path / "none")
    done = processes.run(("-c", PROGRAM), env, tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "none" / "artefacts").exists()
