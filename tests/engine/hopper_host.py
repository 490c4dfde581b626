"""The Hopper engine on a host: one layer, and passes whose launches reach kernels computed there. Test
files import the fixtures by name.
"""

from __future__ import annotations

from functools import partial

import pytest
from engine import fp8_layer, host_kernels
from engine.host_kernels import ACTIVATION_NAMES as NAMES
from engine.host_kernels import KERNELS
from framework import torch

from sonicmoe import interop
from sonicmoe.engine import hopper, hopper_layer, hopper_passes, routed_layer
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.kernels.host import program_source
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import format as quant_format
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["dx256"])
OURS, REFERENCE = HopperEngine(), ReferenceEngine()
T, H, I = 70, 272, 192
MODES = {
    "default": {},
    "recompute_z": {"recompute_z": True},
    "stagewise": {"frees_stagewise": True},
    "everything": {"recompute_z": True, "frees_stagewise": True, "iso_weight": True},
}


@pytest.fixture(name="native", scope="module")
def native_fixture(artefacts):
    return program_source("sm_90a").load(artefacts)


@pytest.fixture(autouse=True)
def host_passes(native, monkeypatch):
    """Launches reach the host's kernels; every byte that nobody wrote is a NaN."""
    passes = hopper_passes.Passes(native, NAMES, KERNELS)
    columns = int(native.numbers()["dprob_columns"])
    monkeypatch.setattr(host_kernels, "DPROB_COLUMNS", columns)
    monkeypatch.setattr(hopper_layer, "passes_on", lambda *key: passes)
    empty = interop.empty

    def poisoned(*args):
        made = empty(*args)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made

    for module in (hopper, hopper_layer, routed_layer, quant_format):
        monkeypatch.setattr(module, "empty", poisoned)


@pytest.fixture(name="use")
def use_fixture(native, monkeypatch):
    """Passes over the host's kernels but for some."""

    def use(kernels=KERNELS, **own):
        passes = hopper_passes.Passes(native, NAMES, kernels | own)
        monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
        return passes

    return use


Case = partial(fp8_layer.Case, tokens=T, hidden=H, inner=I, spare_rows=128)
PER_EXPERT = WeightLayout(transposed=True, split_half=True)
parameter_targets = partial(fp8_layer.parameter_targets, (fp8_layer.E, 2 * I, H, I))
