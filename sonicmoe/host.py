"""This host: its memory, its GPUs, its users' directories, and what to install on it. Standard
library and platformdirs only.

GPUs are asked through NVML: no framework is imported and no CUDA context is made, so a program may
fork afterwards.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from .errors import ConfigError, expect

# The limits of a container, of control groups version 2 and 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
LIBRARY = "libnvidia-ml.so.1"  # every NVIDIA driver installs it
NVIDIA_DRIVER = Path("/dev/nvidiactl")
UNKNOWN = "unknown"
_PADDLE_GPU = (
    "install paddlepaddle-gpu >= 3.3 for your CUDA version from Paddle's own package index, then "
    "pip install 'sonicmoe[hopper]', on Blackwell 'sonicmoe[cuda]' (not [paddle]: its CPU build would "
    "overwrite the GPU build)"
)
# On a machine with a GPU the CPU packages would be the wrong answer.
_ON_GPU = {"torch": "pip install 'sonicmoe[torch,cuda]'", "paddle": _PADDLE_GPU}
_ON_HOST = {"torch": "pip install 'sonicmoe[torch]'", "paddle": "pip install 'sonicmoe[paddle]'"}


def host_memory() -> int:
    """Bytes that this process may use at most: those of the machine, or of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(path.read_text()))
    return min(found)


def require_memory(needed: int, purpose: str, available: int | None = None) -> None:
    """Refuse what cannot fit, before anything is allocated. ConfigError names the purpose, the
    estimate and what is there.

    Args:
        needed: a lower bound in bytes, so that nothing is refused that could run.
        available: bytes; default: `host_memory()`.
    """
    there = host_memory() if available is None else available
    words = f"{purpose} needs at least {gibibytes(needed)} of memory, and this machine has"
    expect(needed <= there, ConfigError, f"{words} {gibibytes(there)}; needed: smaller sizes")


def gibibytes(size: int) -> str:
    """`12.5 GiB`, of whatever size."""
    # In integers: a size that somebody typed may be too large for a floating-point number.
    tenths = size * 10 >> 30
    fraction = f".{tenths % 10}" if tenths < 10**6 else ""
    return f"{count(tenths // 10)}{fraction} GiB"


def count(number: int) -> str:
    """`1,234`; a power of ten where the number would fill the line."""
    # Powers of two give the digits: Python refuses to print integers of thousands of digits.
    if number < 10**15:
        return f"{number:,}"
    return f"10^{int(number.bit_length() * 0.30103)}"


@contextmanager
def _nvml(library: str) -> Iterator[ctypes.CDLL | None]:
    """The driver's library, open; None where there is none, or it does not answer."""
    # Opened and shut down around each question: a process that forks afterwards leaves its child no
    # half of a session with the driver.
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        yield None
        return
    answers = nvml.nvmlInit_v2() == 0
    try:
        yield nvml if answers else None
    finally:
        if answers:
            nvml.nvmlShutdown()


def capabilities_of_host(library: str = LIBRARY) -> tuple[tuple[int, int], ...]:
    """One `(major, minor)` per GPU, `CUDA_VISIBLE_DEVICES` disregarded; empty on a host without a
    driver, without a GPU, or whose driver does not answer.
    """
    # A function that the driver does not have is an AttributeError.
    with suppress(AttributeError), _nvml(library) as nvml:
        return () if nvml is None else _capabilities(nvml)
    return ()


def _capabilities(nvml: ctypes.CDLL) -> tuple[tuple[int, int], ...]:
    number = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
        return ()
    found = []
    for index in range(number.value):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(gpu)) != 0:
            # A GPU that the driver has lost is skipped; the others still count.
            continue
        pair = ctypes.byref(major), ctypes.byref(minor)
        if nvml.nvmlDeviceGetCudaComputeCapability(gpu, *pair) == 0:
            found.append((major.value, minor.value))
    return tuple(found)


def driver_version(library: str = LIBRARY) -> str:
    """The version of the NVIDIA driver ("580.82.07"); "unknown" on a host without one, or if it does not answer."""
    text = ctypes.create_string_buffer(96)
    with suppress(AttributeError), _nvml(library) as nvml:
        if nvml and nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
            return text.value.decode(errors="replace")
    return UNKNOWN


def gpu_present() -> bool:
    """Whether an NVIDIA driver is there: its device, its tool, or its library. Loads none of them."""
    return NVIDIA_DRIVER.exists() or bool(
        shutil.which("nvidia-smi") or ctypes.util.find_library("cuda")
    )


def install_hint(framework: str) -> str:
    """What gives this machine `framework`, "torch" or "paddle"."""
    return (_ON_GPU if gpu_present() else _ON_HOST)[framework]


def too_old(paddle: str) -> str:
    """The error text for a Paddle of that version, which has no torch proxy."""
    needed = f"sonicmoe needs paddle >= 3.3.0: {install_hint('paddle')}"
    return f"paddle {paddle} has no torch proxy; {needed}"


def default_cache_dir() -> Path:
    """The platform's per-user cache directory for this package. ConfigError where this user has no
    home directory.
    """
    try:
        found = platformdirs.user_cache_dir("sonicmoe")
    except RuntimeError:
        found = "~"
    if found.startswith("~"):  # older versions of platformdirs return it as it is
        raise ConfigError(
            f"there is no directory for the compile cache: HOME is unset and user {os.getuid()} is "
            "not known to this system; set SONIC_MOE_CACHE_DIR"
        )
    return Path(found).absolute()


def default_local_cache_dir() -> Path:
    """A per-user directory of this node, for artefacts that `cache_dir` cannot take. ConfigError
    where no temporary directory can be written.
    """
    try:
        return Path(tempfile.gettempdir()) / f"sonicmoe-{os.getuid()}"
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no directory for the node's own copy of the compile cache: "
            f"{error.strerror}; set SONIC_MOE_LOCAL_CACHE_DIR, or TMPDIR"
        ) from None
