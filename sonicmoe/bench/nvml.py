"""SM clock, power and energy of one GPU, from NVML, the library that every NVIDIA driver installs.
Imports no framework.

The package nvidia-ml-py binds the same library. It is a dependency neither of this package nor of
PyTorch, and six calls do not justify one, so they are bound here with ctypes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..errors import SonicMoEError

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
# The driver renews its energy counter every few tens of milliseconds, so reading it more often
# than this finds the same value again.
INTERVAL_S = 0.02


class NvmlError(SonicMoEError, RuntimeError):
    """NVML is missing, or does not answer for this GPU; the message says which."""


class Nvml:
    """One GPU, asked through NVML.

    Raises:
        NvmlError: no library, no driver, or no such GPU; later also where one quantity is not
            supported.
    """

    def __init__(self, uuid: str, library: str = LIBRARY) -> None:
        """uuid: as the driver lists it, "GPU-" and 36 characters. Indices would not do, because
        CUDA and NVML may count GPUs differently.
        """
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"no NVML: {error}") from None
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        try:
            name = ctypes.c_char_p(uuid.encode())
            self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._handle))
        except NvmlError:
            self.close()
            raise

    def sm_mhz(self) -> float:
        """Clock of the multiprocessors now."""
        value = ctypes.c_uint()
        self._call(
            "nvmlDeviceGetClockInfo", self._handle, ctypes.c_int(SM_CLOCK), ctypes.byref(value)
        )
        return float(value.value)

    def limit_watts(self) -> float:
        """Power at which the driver lowers the clocks."""
        return self._milli("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())

    def joules(self) -> float:
        """Energy that the board has used since the driver was loaded."""
        return self._milli("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def close(self) -> None:
        """Undo the initialisation; NVML counts them, so other users in the process keep theirs."""
        self._call("nvmlShutdown")

    def _milli(self, name: str, value: Any) -> float:
        self._call(name, self._handle, ctypes.byref(value))
        return float(value.value) / 1000

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            # ctypes looks a symbol up when it is first named, and raises AttributeError where the
            # library lacks it.
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(f"the driver's NVML is too old: it has no {name}") from None
        code = function(*arguments)
        if code:
            raise NvmlError(f"{name} failed: {self._meaning(code)}")

    def _meaning(self, code: int) -> str:
        describe = self._library.nvmlErrorString
        describe.restype = ctypes.c_char_p
        return (describe(ctypes.c_int(code)) or b"").decode(errors="replace") or f"error {code}"


@dataclass(frozen=True)
class Reading:
    """Means over one stretch of time, from the board's energy counter. limit_watts: the power limit
    in force, None where the driver names none.
    """

    sm_mhz: float
    watts: float
    limit_watts: float | None


class Meter:
    """A thread that samples one GPU while the `with` block runs.

    A thread, because a query takes up to a few milliseconds, in which the program that is measured
    must be able to issue its next launches. ctypes holds no interpreter lock during the query.
    """

    def __init__(self, gpu: Nvml, interval_s: float = INTERVAL_S) -> None:
        """Nothing is sampled yet."""
        self._gpu, self._interval = gpu, interval_s
        self._stop = threading.Event()
        self._clocks: list[float] = []
        self._energies: list[tuple[float, float]] = []  # (seconds, joules), where joules changed
        self._failure: NvmlError | None = None
        # A daemon, so that a program which fails inside the block can end.
        self._thread = threading.Thread(target=self._sample, name="nvml-meter", daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def reading(self) -> Reading:
        """Of the `with` block that has ended.

        Raises:
            NvmlError: a query failed, or the block was too short for the counter.
        """
        if self._failure is not None:
            raise self._failure
        # The limit is only shown beside the power, so a board that names none still has a reading.
        try:
            limit = self._gpu.limit_watts()
        except NvmlError:
            limit = None
        return Reading(median(self._clocks), mean_watts(self._energies), limit)

    def _sample(self) -> None:
        try:
            # At least one sample is taken, however short the block was.
            while True:
                joules = self._gpu.joules()
                if not self._energies or joules != self._energies[-1][1]:
                    self._energies.append((time.perf_counter(), joules))
                self._clocks.append(self._gpu.sm_mhz())
                if self._stop.wait(self._interval):
                    return
        except NvmlError as failure:
            self._failure = failure


def mean_watts(energies: list[tuple[float, float]]) -> float:
    """Mean power between the second and the last change of an energy counter, given `(seconds,
    joules)` of the first reading and of every change.

    The first reading is left out, because it says nothing about when its value was new.

    Raises:
        NvmlError: it changed less than twice.
    """
    if len(energies) < 3:
        raise NvmlError("the time was too short for the board's energy counter")
    (began, first), (ended, last) = energies[1], energies[-1]
    return (last - first) / (ended - began)
