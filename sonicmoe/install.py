"""How to install what is missing, on this machine: on one with a GPU the CPU packages would be the
wrong answer.
"""

from __future__ import annotations

import ctypes.util
import shutil
from pathlib import Path

NVIDIA_DRIVER = Path("/dev/nvidiactl")
_PADDLE_GPU = (
    "install paddlepaddle-gpu >= 3.3 for your CUDA version from Paddle's own package index, then pip install 'sonicmoe[cuda]' "
    "(not [paddle]: its CPU build would overwrite the GPU build)"
)
_ON_GPU = {"torch": "pip install 'sonicmoe[torch,cuda]'", "paddle": _PADDLE_GPU}
_ON_HOST = {"torch": "pip install 'sonicmoe[torch]'", "paddle": "pip install 'sonicmoe[paddle]'"}


def gpu_present() -> bool:
    """Whether an NVIDIA driver is there: its device, its tool, or its library. Loads none of them."""
    return NVIDIA_DRIVER.exists() or bool(
        shutil.which("nvidia-smi") or ctypes.util.find_library("cuda")
    )


def install_hint(framework: str) -> str:
    """What gives this machine `framework`, "torch" or "paddle"."""
    return (_ON_GPU if gpu_present() else _ON_HOST)[framework]
