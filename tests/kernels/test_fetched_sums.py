"""Up to how many rows wgrad fetches its sums, compiled for the host with a driver that has two cards."""

from __future__ import annotations

import ctypes
import subprocess

from kernels.host_cuda import cuda_include
from kernels.needs import HOST_COMPILER
from worlds import ROOT

pytestmark = HOST_COMPILER
HEADER = ROOT / "sonicmoe/kernels/sm90/fetched_sums.hpp"
SHIM = """
#include <cuda_runtime.h>
#define TVM_FFI_CHECK_CUDA_ERROR(call) call
struct DLDevice { int device_type, device_id; };
"""
# Device 0 is an H100, device 1 an H200: kHz, and bits.
DRIVER = """
static int questions = 0;
extern "C" int asked() { return questions; }
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++questions;
  const bool clock = attribute == cudaDevAttrMemoryClockRate;
  *value = clock ? (device ? 3201000 : 2619000) : (device ? 6144 : 5120);
  return cudaSuccess;
}
extern "C" bool fetches(int output, int64_t rows, int64_t experts, bool half, int device) {
  const auto most = half ? sonicmoe::kRowsToFetchHalf : sonicmoe::kRowsToFetch;
  const auto how = static_cast<sonicmoe::sm90::WgradOutput>(output);
  return sonicmoe::fetches_sums(how, rows, experts, most, {2, device});
}
"""


def test_faster_memory_has_a_lower_bound_and_is_asked_for_once(tmp_path):
    source, library = tmp_path / "rule.cpp", tmp_path / "rule.so"
    rule = HEADER.read_text(encoding="utf-8").replace('#include "../host/border.hpp"', SHIM)
    source.write_text(rule + DRIVER, encoding="utf-8")
    folders = [f"-I{folder}" for folder in (cuda_include(), HEADER.parent)]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-w",
        *folders,
        source,
        "-o",
        library,
    ]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    number = ctypes.c_int64
    loaded.fetches.argtypes = [ctypes.c_int, number, number, ctypes.c_bool, ctypes.c_int]
    loaded.fetches.restype = ctypes.c_bool

    def most(half: bool, device: int) -> int:
        """Rows of an expert."""
        return max(rows for rows in range(1, 2000) if loaded.fetches(0, 8 * rows, 8, half, device))

    assert [most(half, device) for half in (False, True) for device in (0, 1)] == [
        1280,
        832,
        640,
        320,
    ]
    assert not any(loaded.fetches(written, 8, 8, False, 0) for written in (1, 2))
    assert loaded.asked() == 4  # two questions of each card
