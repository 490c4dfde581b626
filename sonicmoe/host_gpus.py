"""The compute capabilities of this host's GPUs, from NVML: no framework is imported and no CUDA
context is made, so a program may fork afterwards.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

LIBRARY = "libnvidia-ml.so.1"  # every NVIDIA driver installs it
UNKNOWN = "unknown"


def capabilities_of_host(library: str = LIBRARY) -> tuple[tuple[int, int], ...]:
    """One `(major, minor)` per GPU, `CUDA_VISIBLE_DEVICES` disregarded; empty on a host without a
    driver, without a GPU, or whose driver does not answer.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return ()
    # A function that the driver does not have is an AttributeError.
    with suppress(AttributeError):
        if nvml.nvmlInit_v2() == 0:
            try:
                return _capabilities(nvml)
            finally:
                nvml.nvmlShutdown()
    return ()


def _capabilities(nvml: ctypes.CDLL) -> tuple[tuple[int, int], ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        answered = nvml.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(index), ctypes.byref(gpu)
        ) == 0 and (
            nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
            == 0
        )
        if answered:
            found.append((major.value, minor.value))
    return tuple(found)


def driver_version(library: str = LIBRARY) -> str:
    """Of the NVIDIA driver ("580.82.07"); "unknown" on a host without one, or if it does not answer."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return UNKNOWN
    text = ctypes.create_string_buffer(96)
    with suppress(AttributeError):
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
                    return text.value.decode(errors="replace")
            finally:
                nvml.nvmlShutdown()
    return UNKNOWN
