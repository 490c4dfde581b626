"""Importing this gives numpy, PyTorch and Paddle one computing thread each; they read it when they
are imported, so it comes before all of them.

Many small operations, several test processes: threads would only wait for each other. With two
processes on two cores, a product of small matrices takes numpy fifty times as long.
"""

from __future__ import annotations

import os

POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
for pool in POOLS:
    os.environ.setdefault(pool, "1")
