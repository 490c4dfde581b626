"""Engine `bf16` on a host: its launches reach GEMMs that are computed there, those of quack-kernels or
those for Hopper. Test files import the fixture by name.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from engine.host_gemms import Bf16Gemms, Bf16Rows
from engine.host_hopper_gemms import HopperGemms, HostMatrices
from engine.host_kernels import gradient_parts, narrow_gradient, narrow_rows, prepare_factor

from sonicmoe.engine import bf16, bf16_sm90, bf16_weights
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.blackwell import quack_products
from sonicmoe.engine.gpu import Gpu
from sonicmoe.enums import ActivationType

QUACK, HOPPER = "quack", "hopper"


class NarrowKernels:
    """The module of the narrow products."""

    narrow_rows = staticmethod(narrow_rows)
    narrow_gradient = staticmethod(narrow_gradient)
    gradient_parts = staticmethod(gradient_parts)
    prepare_factor = staticmethod(prepare_factor)


class Launches:
    """What reached the GEMMs. `every`: the multiprocessors of a launch without a cap. loads: calls
    before the first weight gradient. of: the class of the GEMMs. products: that of the products.
    """

    def __init__(self, kind):
        self.calls, self.lent, is_hopper = [], set(), kind == HOPPER
        self.kind = kind
        self.every = 0 if is_hopper else 132
        self.loads = [] if is_hopper else ["load wgrad_down", "load wgrad_up"]
        self.of = HopperGemms if is_hopper else Bf16Gemms
        self.products = bf16_sm90.HopperProducts if is_hopper else quack_products._QuackProducts

    def clear(self):
        self.calls.clear()
        self.lent.clear()

    def quack(self, shape, lent):
        self.lent.add(lent)
        made = Bf16Gemms(shape)
        made.calls = self.calls
        return made

    def hopper(self, device, activation, parameters, dtype, rows_first, separate, low_rank):
        made = HopperGemms(activation, parameters, self.calls, self.lent)
        matrices = HostMatrices if separate else None
        return bf16_sm90.Kernels.of(made, made, made, matrices, made.gate)

    def wgrad(self, device, dtype):
        made = HopperGemms(ActivationType.SWIGLU, (), self.calls, self.lent)
        return bf16_sm90.Wgrad(made)


@pytest.fixture(name="launches", autouse=True, params=[QUACK, HOPPER])
def launches_fixture(request, monkeypatch):
    """Every test runs over both kinds of GEMMs, unless it asks for one."""
    found = Launches(request.param)
    monkeypatch.setattr(Bf16Engine, "_runs_beside", lambda self, weight: True)
    for module in (bf16, quack_products):
        monkeypatch.setattr(module, "ExpertRows", Bf16Rows)
        monkeypatch.setattr(module, "launch_scope", lambda tensor: nullcontext())
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu("sm_100a", 132))
    monkeypatch.setattr(bf16_weights, "_known", {})
    monkeypatch.setattr(bf16_weights, "_DEPTH", 8)  # these I are no multiples of 64
    monkeypatch.setattr(bf16, "_is_hopper", lambda device: request.param == HOPPER)
    # Of quack-kernels.
    monkeypatch.setattr(quack_products, "grouped_gemms", found.quack)
    # Of Hopper, which reads weights where they lie.
    monkeypatch.setattr(bf16, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(bf16_sm90, "kernels_on", found.hopper)
    monkeypatch.setattr(bf16_sm90, "wgrad_on", found.wgrad)
    monkeypatch.setattr(bf16_sm90, "narrow_kernels", lambda device: NarrowKernels)
    monkeypatch.setattr(bf16_sm90, "_TILE_COLUMNS", HopperGemms.COLUMNS)
    return found
