"""The package's front door in processes of their own: without PyTorch, under Paddle's proxy, and as
upstream's users enter it.
"""

from __future__ import annotations

import os
from pathlib import Path

import processes
import pytest

from sonicmoe.host import install_hint

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # `import torch` then fails as where it is not installed
"""
UNDER_PADDLE = """
import paddle
paddle.enable_compat(scope={"sonicmoe"}, silent=True)
"""
IMPORT = """
try:
    %s
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""


def python(*arguments):
    """Lines of output of a process of its own."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SONIC", "COV_"))
    }
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3"}
    done = processes.run([*arguments], clean, ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


IMPORTS = [
    "from sonicmoe import MoE",
    "import sonicmoe; sonicmoe.MoE",
    "from sonicmoe import moe_general_routing_inputs",
    "import sonicmoe.moe",
    "import sonicmoe.functional",
]


def test_without_torch():
    """Every door says what to install, at the first knock and at the next; names that need no
    framework are there.
    """
    attempts = "".join(IMPORT % statement for statement in IMPORTS[:3] * 2)
    names = "from sonicmoe import SonicMoEConfig, ActivationType, KernelBackendMoE\n"
    names += "print(KernelBackendMoE.torch.value, ActivationType('swiglu').name)"
    lines = python("-c", WITHOUT_TORCH + attempts + names)
    assert lines.pop() == "torch SWIGLU"
    assert len(lines) == 6
    wanted = f"FrameworkError: sonicmoe needs PyTorch ({install_hint('torch')}), or Paddle"
    assert all(line.startswith(wanted) for line in lines), lines


@pytest.mark.paddle
def test_under_paddle():
    """The PyTorch face is not for Paddle, and says which one is; the node still works afterwards."""
    attempts = "".join(IMPORT % statement for statement in IMPORTS * 2)
    lines = python(
        "-c",
        UNDER_PADDLE
        + attempts
        + "from sonicmoe.ernie_compat import SonicMoEMlpNode as N\nprint(N.__name__)",
    )
    assert lines.pop() == "SonicMoEMlpNode"
    assert len(lines) == 10
    for line in lines:
        assert line.startswith("FrameworkError:") and "PyTorch face" in line, line
        assert "sonicmoe.ernie_compat.SonicMoEMlpNode" in line


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_upstream_script_runs_unchanged(device):
    (line,) = python(str(Path(__file__).with_name("upstream_script.py")), device)
    assert line.startswith("shape (4, 16, 64), aux loss ")
