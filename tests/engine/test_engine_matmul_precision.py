"""The reference engine computes in fp32 although the program around it asked for TF32 or bf16
products.
"""

from __future__ import annotations

import sys

import pytest
from engine.moe_golden import assert_same_bits, make_problem, run_engine
from framework import torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.interop import IS_PADDLE, ieee_matmul


def switches():
    if IS_PADDLE:
        return sys.modules["paddle"].base.core.get_cublas_switch()
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(params=["highest", "medium"])
def relaxed(request):
    """Fast products on (the PyTorch call sets GPU and CPU), or off; as before afterwards."""
    if IS_PADDLE:
        core = sys.modules["paddle"].base.core
        before = core.get_cublas_switch()
        core.set_cublas_switch(request.param == "medium")
        yield
        core.set_cublas_switch(before)
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(request.param)
        yield
        torch.set_float32_matmul_precision(before)


def test_no_bit_depends_on_the_programs_choice(relaxed):
    problem, found = make_problem(), switches()
    fast = run_engine(problem, EngineSettings())
    with ieee_matmul():
        exact = run_engine(problem, EngineSettings())
    assert_same_bits(fast, exact)
    assert switches() == found
