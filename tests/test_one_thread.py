"""The tests' processes compute on one thread, whichever test module imports numpy first."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest


def test_numpy_was_imported_after_the_number_of_threads_was_set() -> None:
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    libraries = [*folder.glob("libscipy_openblas64_*.so")]
    if not libraries:
        pytest.skip("this numpy has no OpenBLAS of its own")
    threads = ctypes.CDLL(str(libraries[0])).scipy_openblas_get_num_threads64_()
    assert threads == min(int(os.environ["OPENBLAS_NUM_THREADS"]), os.cpu_count() or 1)
