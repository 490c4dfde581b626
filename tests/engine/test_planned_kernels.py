"""A warm-up compiles what the passes of the engines load: a kernel that it lacks is compiled in the first
step of every run, and refused where nothing may compile.
"""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from sonicmoe.engine import bf16_sm90, hopper_passes
from sonicmoe.engine.kernel_jobs import bf16_jobs, hopper_jobs
from sonicmoe.engine.settings import EngineSettings, Workload
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.jit.shared_object import SharedObject
from sonicmoe.kernels import EVERY_RUN
from sonicmoe.kernels.blackwell.quack_gemm import (
    STORED,
    MlpShape,
    Stored,
    all_kernels,
    wgrad_kernel,
)

ARCH = "sm_90a"


@pytest.fixture
def loaded(monkeypatch):
    """What is loaded: no kernel is, each has whatever is asked of it."""
    found = []

    def load(source, cache=None):
        found.append(source.key())
        return MagicMock()

    monkeypatch.setattr(SharedObject, "load", load)
    for module in (bf16_sm90, hopper_passes):
        monkeypatch.setattr(module, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(bf16_sm90, "launch_parameters", lambda *names: (0, 0.0, 0.0))
    for module, name in ((hopper_passes, "Passes"), (bf16_sm90, "Passes"), (bf16_sm90, "Wgrad")):
        monkeypatch.setattr(module, name, MagicMock())
    return found


def planned(jobs, **workload):
    work = Workload(EngineSettings(), 256, 128, **workload)
    sources = *jobs(work, ARCH), *(source(ARCH) for source in EVERY_RUN)
    return {source.key() for source in sources}


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_of_bf16(loaded, separate, low_rank):
    own = ActivationType.SWIGLU, None, "bfloat16", bf16_sm90.gathers_first(128)
    bf16_sm90.passes_on.__wrapped__("cuda:0", *own, separate, low_rank)
    bf16_sm90.wgrad_on.__wrapped__("cuda:0", "bfloat16")
    assert set(loaded) <= planned(bf16_jobs, separate=separate, low_rank=low_rank)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_of_fp8(loaded, bias, low_rank):
    own = ActivationType.SWIGLU, ZCode.ADAPTIVE, bias, low_rank
    hopper_passes.passes_on.__wrapped__("cuda:0", *own)
    assert set(loaded) <= planned(hopper_jobs, bias=bias, low_rank=low_rank)


def test_plain_weight_gradients_beside_biases_sum_these_too():
    work = Workload(EngineSettings(fp8_wgrad=False), 256, 128, bias=True)
    assert "expert_rows" in {job.name for job in hopper_jobs(work, ARCH)}


@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.GELU])
def test_every_variant_that_a_destination_of_blackwells_gradients_asks_for(activation):
    for hidden, inner in ((3072, 1536), (2048, 768), (512, 384), (2880, 2880)):
        shape = MlpShape(hidden, inner, activation, arch="sm_100a")
        kernels = set(all_kernels(shape))
        for product in ("wgrad_down", "wgrad_up"):
            for stored in STORED[product]:
                halves = product == "wgrad_up" and stored is Stored.HALVES
                asked = wgrad_kernel(product, shape, stored) in kernels
                assert asked == (activation is ActivationType.SWIGLU or not halves)
