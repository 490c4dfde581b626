"""SM clock, power and energy of one GPU while something runs, from NVML by way of nvidia-ml-py,
which is optional.
"""

from __future__ import annotations

import threading
import time
from statistics import median

import torch

from .figures import PowerReading

# Not in the thread, because an import holds the interpreter lock while launches should be issued.
try:
    import pynvml
except ImportError:
    pynvml = None

# The driver renews its energy counter every few tens of milliseconds, so reading it more often
# than this finds the same value again.
INTERVAL_S = 0.02


class Meter:
    """A thread that samples the GPU of `device` while the `with` block runs.

    A thread, because a query takes up to a few milliseconds, in which the program that is measured
    must be able to issue its next launches. No interpreter lock is held during a query.
    """

    def __init__(self, device: str) -> None:
        """Nothing is sampled yet. device: as PyTorch names it."""
        self._device = device
        self._stop = threading.Event()
        self._limit = 0.0
        self._clocks: list[float] = []
        self._energies: list[tuple[float, float]] = []  # (seconds, joules), where joules changed
        self._failure: str | None = None
        # A daemon, so that a program which fails inside the block can end.
        self._thread = threading.Thread(target=self._run, name="power-meter", daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def reading(self) -> PowerReading | str:
        """What the board did during the `with` block that has ended, or why nobody knows."""
        if self._failure is not None:
            return self._failure
        watts = mean_watts(self._energies)
        if watts is None:
            return "the time was too short for the board's energy counter"
        return PowerReading(median(self._clocks), watts, self._limit)

    def _run(self) -> None:
        if self._device == "cpu":
            self._failure = "no GPU"
            return
        if pynvml is None:
            self._failure = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            return
        try:
            pynvml.nvmlInit()
            self._sample()
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            self._failure = f"NVML: {error}"

    def _sample(self) -> None:
        # Not by its index, because CUDA and NVML may count GPUs differently.
        uuid = torch.cuda.get_device_properties(self._device).uuid
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
        # At least one sample is taken, however short the block was.
        while True:
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
            if not self._energies or joules != self._energies[-1][1]:
                self._energies.append((time.perf_counter(), joules))
            self._clocks.append(float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)))
            if self._stop.wait(INTERVAL_S):
                return


def mean_watts(energies: list[tuple[float, float]]) -> float | None:
    """Mean power between the second and the last change of an energy counter, given `(seconds,
    joules)` of the first reading and of every change; None where it changed less than twice.

    The first reading is left out, because it says nothing about when its value was new.
    """
    if len(energies) < 3:
        return None
    (began, first), (ended, last) = energies[1], energies[-1]
    return (last - first) / (ended - began)
