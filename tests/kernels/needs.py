"""What tests of kernels need of this machine."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from sonicmoe.jit.toolchain import find_toolkit

_CUDA = pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc and its headers")
_FFI = pytest.mark.skipif(
    importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"
)
_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

NVCC = [_CUDA, _FFI]  # kernels are compiled, and loaded
HOST_COMPILER = [_CUDA, _GXX]  # their text is compiled for the host
HOST_MODULE = [_CUDA, _GXX, _FFI]  # and loaded as a module


def can_load_kernels() -> bool:
    """Whether nothing that `HOST_MODULE` names is missing."""
    return not any(mark.args[0] for mark in HOST_MODULE)
