"""The package's front door: in a process without PyTorch, and as upstream's users enter it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import processes
import pytest

from sonicmoe.host import install_hint

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # `import torch` then fails as where it is not installed
"""
IMPORT = """
try:
    %s
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""
IMPORTS = [
    "from sonicmoe import MoE",
    "import sonicmoe; sonicmoe.MoE",
    "from sonicmoe import moe_general_routing_inputs",
]


def test_without_torch():
    """Every door says what to install, at the first knock and at the next; names that need no
    framework are there.
    """
    attempts = "".join(IMPORT % statement for statement in IMPORTS * 2)
    names = "from sonicmoe import SonicMoEConfig, ActivationType, KernelBackendMoE\n"
    names += "print(KernelBackendMoE.torch.value, ActivationType('swiglu').name)"
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SONIC", "COV_"))
    }
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run(["-c", WITHOUT_TORCH + attempts + names], clean, ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.strip().splitlines()
    assert last == "torch SWIGLU" and len(lines) == 6
    wanted = f"FrameworkError: sonicmoe needs PyTorch ({install_hint('torch')}), or Paddle"
    assert all(line.startswith(wanted) for line in lines), lines


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_upstream_script_runs_unchanged(device, monkeypatch, capsys):
    script = Path(__file__).with_name("upstream_script.py")
    monkeypatch.setattr(sys, "argv", [str(script), device])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith("shape (4, 16, 64), aux loss ")
