"""The Hopper engine on a host: one layer, and passes whose launches reach kernels computed there. Test
files import the fixtures by name.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from engine import host_kernels
from engine.host_kernels import ACTIVATION_NAMES as NAMES
from engine.host_kernels import KERNELS, STEADY_KERNELS
from framework import torch

from sonicmoe import interop
from sonicmoe.engine import hopper, hopper_layer, hopper_passes
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.targets import ParameterTargets
from sonicmoe.enums import ZCode
from sonicmoe.kernels.host import passes_source
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import format as quant_format
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.build import build_routing

FP8, ROW128 = (EngineSettings(recipe=RECIPES[name]) for name in ("dx256", "row128-dx256"))
OURS, REFERENCE = HopperEngine(), ReferenceEngine()
T, H, I, E, K = 70, 272, 320, 4, 3
MODES = {
    "default": {},
    "recompute_z": {"recompute_z": True},
    "stagewise": {"frees_stagewise": True},
    "iso_weight": {"iso_weight": True},
    "z in bf16": {"save_z": ZCode.BF16},
    "z in bf16, recomputed": {"save_z": ZCode.BF16, "recompute_z": True},
    "everything": {"recompute_z": True, "frees_stagewise": True, "iso_weight": True},
}


@pytest.fixture(name="native", scope="module")
def native_fixture(artefacts):
    return passes_source("sm_90a").load(artefacts)


@pytest.fixture(autouse=True)
def host_passes(native, monkeypatch):
    """Launches reach the host's kernels; every byte that nobody wrote is a NaN."""
    passes = hopper_passes.Passes(native, NAMES, KERNELS)
    columns = int(native.numbers()["dprob_columns"])
    monkeypatch.setattr(host_kernels, "DPROB_COLUMNS", columns)
    steady = hopper_passes.Passes(native, NAMES, STEADY_KERNELS)
    monkeypatch.setattr(
        hopper_layer, "passes_on", lambda *key: steady if key[4:] == (True,) else passes
    )
    empty = interop.empty

    def poisoned(*args):
        made = empty(*args)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made

    for module in (hopper, hopper_layer, hopper_passes, quant_format):
        monkeypatch.setattr(module, "empty", poisoned)


@pytest.fixture(name="use")
def use_fixture(native, monkeypatch):
    """Passes over the host's kernels but for some."""

    def use(kernels=KERNELS, **own):
        passes = hopper_passes.Passes(native, NAMES, kernels | own)
        monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
        return passes

    return use


class Case:
    """bf16 operands of one layer; one expert without tokens, both sentinels, and more rows than are
    needed.
    """

    def __init__(self, tokens=T, *, spare_rows=128, seed=0, invalid=0.3):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size, scale=1.0):
            return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)

        self.x, self.dout = normal(tokens, H), normal(tokens, H)
        self.w1, self.w2 = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
        ids = torch.rand(tokens, E - 1, generator=generator).argsort(1)[:, :K]
        drop = torch.rand(tokens, K, generator=generator) < invalid
        sentinel = torch.where(torch.rand(tokens, K, generator=generator) < 0.5, -1, E)
        probs = torch.rand(tokens, K, generator=generator) + 0.05
        self.routing = with_spare_rows(
            build_routing(torch.where(drop, sentinel, ids), probs, E), spare_rows
        )

    def quantised(self, *names):
        """The same with x, or what is named, as its sender quantised it; tokens without a valid
        slot are NaN.
        """
        other = copy.copy(self)
        unused = torch.ones(len(self.x), dtype=torch.bool)
        unused[self.routing.row_token[self.routing.row_token >= 0].long()] = False
        for name in names or ("x",):
            q = quantize(getattr(self, name).float(), rows(128))
            q.bytes[unused], q.scale_inv[unused] = 0x7F, float("nan")
            setattr(other, name, q)
        return other

    def forward(self, settings=FP8, engine=OURS, **options):
        """`(prepared weights, out, saved)`."""
        weights = engine.prepare_weights(self.w1, self.w2, None, None, settings)
        return weights, *engine.forward(self.x, self.routing, weights, settings, **options)

    def run(self, engine, settings, **options):
        sums = options.get("targets") or accumulators()
        weights, out, saved = self.forward(settings, engine)
        dx, dprobs, pending = engine.backward_dx(self.dout, saved, weights)
        pending.shares_gpu = options.get("shares_gpu", False)
        engine.backward_dw(pending, sums)
        dw1, dw2 = sums.sums("dw1"), sums.sums("dw2")
        return {"out": out, "dx": dx, "dprobs": dprobs, "dw1": dw1, "dw2": dw2}


def accumulators():
    return NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu")


PER_EXPERT = WeightLayout(transposed=True, split_half=True)


def parameter_targets(layout, *, stacked=False, frozen=()):
    """fp32 memory of every expert in that layout; not of those of `frozen`."""
    shapes = (2 * I, H), (H, I)
    if layout.transposed:
        shapes = tuple(shape[::-1] for shape in shapes)
    if stacked:
        return ParameterTargets(
            *(WeightTarget.stacked(torch.zeros((E, *shape)), E, layout) for shape in shapes)
        )
    made = [[None if e in frozen else torch.zeros(s) for e in range(E)] for s in shapes]
    return ParameterTargets(*(WeightTarget.per_expert(tensors, layout) for tensors in made))


def with_spare_rows(routing, count):
    """As a builder leaves it that does not know the counts on the host: padding rows behind
    everybody's.
    """
    rows = routing.num_rows + count
    longer = {
        name: torch.cat(
            [getattr(routing, name), torch.full((count,), fill, dtype=getattr(routing, name).dtype)]
        )
        for name, fill in (("row_token", -1), ("row_prob", 0))
    }
    return replace(routing, num_rows=rows, **longer)


def assert_close(got, wanted, tolerance=2e-5):
    """Equal codes everywhere, so results differ by fp32 rounding and one of bf16."""
    for name, tensor in wanted.items():
        error, size = (got[name].float() - tensor.float()).norm(), tensor.float().norm()
        assert got[name].dtype == tensor.dtype and float(error) <= tolerance * max(
            float(size), 1e-30
        ), (
            name,
            float(error / size),
        )
