"""Trials on a GPU: every engine of this build passes its own, and planted CUDA kernels that compute
wrong, fault or never end are found without harm to the process that asked.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.planted_engines import trials_of_this_process
from gpu import planted_gpu_engines
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.engine import select, trial_process, trust
from sonicmoe.engine.capabilities import BF16, MXFP8, RECORDS, REFERENCE, problem
from sonicmoe.engine.cold_start import compile_missing
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import Workload
from sonicmoe.engine.trust import Subject, try_engine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.jit.cache import default_cache
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.backends import arch_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
FP8 = EngineSettings(recipe=RECIPES["dx256"])
WORKLOADS = {
    "swiglu": Workload(EngineSettings(), 256, 128),
    "relu, bias, fp16": Workload(EngineSettings(ActivationType.RELU), 256, 128, "float16", True),
    "fp8": Workload(FP8, 512, 256),
    "fp8, least memory": Workload(replace(FP8, recompute_z=True, frees_stagewise=True), 512, 256),
}
# This project has no GPU for these: whoever has one runs them first.
MX = EngineSettings(recipe=RECIPES["iso32-pow2"], save_z=ZCode.BF16)
MX_SIZES = ((512, 256), (1024, 800), (1440, 1440))
MX_CHANGES = (
    {},
    {"recompute_z": True},
    {"frees_stagewise": True},
    {"fp8_wgrad": False},
    {"gemm_num_sms": 64},
)
WORKLOADS |= {
    f"mxfp8 {sizes} {changes}": Workload(replace(MX, **changes), *sizes)
    for sizes, changes in pairwise(MX_SIZES, MX_CHANGES)
}
WORKLOADS |= {
    f"mxfp8 {activation.value}": Workload(replace(MX, activation=activation), 512, 256)
    for activation in MXFP8.activations
}
# What each engine computes, on some architecture.
TRIALS = [
    (name, workload)
    for name, record in RECORDS.items()
    for workload, asked in WORKLOADS.items()
    if record is not REFERENCE and problem(record, asked) is None
]


@pytest.fixture(autouse=True)
def fresh():
    trust._KNOWN.clear()
    yield
    trust._KNOWN.clear()


@pytest.mark.parametrize(
    ("name", "workload"), TRIALS, ids=lambda value: getattr(value, "value", value)
)
def test_every_engine_passes_its_trial(name, workload):
    """Printed with `-rP`: how far the outputs of each case are off."""
    arch, asked = arch_of(DEVICE), WORKLOADS[workload]
    if why := problem(RECORDS[name], asked, arch):
        pytest.skip(why)
    compile_missing(RECORDS[name], asked, arch)
    subject = Subject(select.ENGINES[name], RECORDS[name], asked, DEVICE, arch)
    verdict = try_engine(subject)
    worst: dict[str, tuple[float, float]] = {}
    for case in verdict.cases:
        for output, errors in case["errors"].items():
            worst[output] = tuple(map(max, zip(errors, worst.get(output, (0, 0)), strict=True)))
    print(f"{name.value}, {workload}: {len(verdict.cases)} cases;", {
        output: f"{rmse:.2e} {element:.3f}" for output, (rmse, element) in worst.items()
    })  # fmt: skip
    assert verdict.trusted, verdict.reason


@pytest.fixture(scope="module")
def planted_cache(tmp_path_factory):
    """A cache of its own with the kernels that every run needs, and the planted ones."""
    root = tmp_path_factory.mktemp("planted")
    config = SonicMoEConfig(cache_dir=root / "cache", local_cache_dir=root / "local")
    arch = arch_of(DEVICE)
    with config.activate():
        compile_missing(NOT_PROVEN, WORKLOADS["swiglu"], arch)
        for kind in range(3):
            planted_gpu_engines.planted_source(kind, arch).compile(default_cache())
    return config


NOT_PROVEN = replace(BF16, proven=(), jobs=lambda workload, arch: ())
PLANTED = [
    (planted_gpu_engines.WrongNumber, "training: dprobs is "),
    (planted_gpu_engines.Faults, "training: exit status 1 ("),
    (planted_gpu_engines.NeverEnds, "training: did not end within 10 s"),
]


@pytest.mark.parametrize(
    ("engine", "words"), PLANTED, ids=["a wrong number", "a fault", "an endless loop"]
)
def test_a_planted_kernel_is_found_and_harms_nobody(planted_cache, monkeypatch, engine, words):
    here = torch.arange(8.0, device=DEVICE)
    with planted_cache.activate():
        subject = Subject(engine, NOT_PROVEN, WORKLOADS["swiglu"], DEVICE, arch_of(DEVICE))
        monkeypatch.setattr(trial_process, "CASE_S", 10.0)
        verdict = try_engine(subject)
    assert not verdict.trusted and verdict.reason.startswith(words), verdict.reason
    if engine is planted_gpu_engines.Faults:
        assert "CUDA error" in verdict.reason, verdict.reason
    assert [case["case"] for case in verdict.cases[:2]] == ["routing", "inference"]
    assert [case["problem"] for case in verdict.cases[:2]] == [None, None]
    # This process computes on, and the other one is gone, and with it its memory.
    assert float((here * 2).sum()) == 56.0
    assert not trials_of_this_process()
