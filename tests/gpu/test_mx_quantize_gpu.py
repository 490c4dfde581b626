"""MXFP8's quantisers on the device, by the tests of their kernels on a host. No instruction of compute
capability 10.0 is in them, so any GPU from 8.9 on shows it.
"""

from __future__ import annotations

import pytest
from kernels.test_mx_on_host import TestRows, TestWeights  # noqa: F401

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    with memory_full_of_nan("cuda"):
        yield "cuda"
