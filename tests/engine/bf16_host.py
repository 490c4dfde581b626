"""Engine `bf16` on a host: its launches reach GEMMs that are computed there, those of quack-kernels or
those for Hopper. Test files import the fixture by name.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from engine.host_gemms import Bf16Gemms, Bf16Rows
from engine.host_hopper_gemms import HopperGemms, HostMatrices, launched

from sonicmoe.engine import bf16, bf16_sm90, bf16_weights, plain_engine
from sonicmoe.engine.blackwell import quack_products
from sonicmoe.engine.gpu import Gpu
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.host import program_source

QUACK, HOPPER = "quack", "hopper"


class Launches:
    """What reached the GEMMs. `every`: the multiprocessors of a launch without a cap. loads: calls
    before the first weight gradient. of: the class of the GEMMs. dgrad: their product of dx.
    """

    def __init__(self, kind, native):
        self.calls, self.lent, is_hopper = [], set(), kind == HOPPER
        self.kind = kind
        self.every = 0 if is_hopper else 132
        self.loads = [] if is_hopper else ["load wgrad_down", "load wgrad_up"]
        self.of = HopperGemms if is_hopper else Bf16Gemms
        self.dgrad = "grouped_gemm" if is_hopper else "dgrad"
        self.native = native

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
        return bf16_sm90.Passes(self.native, made.kernels(), dtype, matrices, made.gate)

    def wgrad(self, device, dtype):
        made = HopperGemms(ActivationType.SWIGLU, (), self.calls, self.lent)
        wgrad = launched(made.wgrad)
        destination = HopperGemms.wgrad_destination
        module = SimpleNamespace(wgrad=wgrad, wgrad_destination=destination)
        return bf16_sm90.Wgrad(self.native, module, dtype)


def executor(artefacts):
    """The native executor, told of the columns of these GEMMs' tiles."""
    native = program_source("sm_90a").load(artefacts)
    numbers = {**native.numbers(), "dprob_columns": HopperGemms.COLUMNS}
    calls = {name: getattr(native, name) for name in ("make_bound", "part_ends", "make_program")}
    return SimpleNamespace(numbers=lambda: numbers, **calls)


@pytest.fixture(name="launches", autouse=True, params=[QUACK, HOPPER])
def launches_fixture(request, monkeypatch):
    """Every test runs over both kinds of GEMMs, unless it asks for one."""
    is_hopper = request.param == HOPPER
    native = executor(request.getfixturevalue("artefacts")) if is_hopper else None
    found = Launches(request.param, native)
    monkeypatch.setattr(plain_engine, "is_cuda", lambda weight: True)
    for module in (bf16, quack_products):
        monkeypatch.setattr(module, "ExpertRows", Bf16Rows)
        monkeypatch.setattr(module, "launch_scope", lambda tensor: nullcontext())
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu("sm_100a", 132))
    monkeypatch.setattr(bf16_weights, "_known", {})
    monkeypatch.setattr(bf16_weights, "_DEPTH", 8)  # these I are no multiples of 64
    monkeypatch.setattr(bf16, "_is_hopper", lambda device: is_hopper)
    # Of quack-kernels.
    monkeypatch.setattr(quack_products, "grouped_gemms", found.quack)
    monkeypatch.setattr(quack_products, "dprob_tiles", Bf16Gemms.tiles)
    # Of Hopper, which reads weights where they lie.
    monkeypatch.setattr(bf16, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(bf16_sm90, "passes_on", found.hopper)
    monkeypatch.setattr(bf16_sm90, "wgrad_on", found.wgrad)
    monkeypatch.setattr(bf16_sm90, "ExpertRows", Bf16Rows)
    return found
