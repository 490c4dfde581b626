"""Cases of tests/oracle through the engines of a GPU without one: their real host code, native passes
included, over kernels computed on the host.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
from framework import IS_PADDLE

if IS_PADDLE:
    pytest.skip("launch arguments are read through PyTorch", allow_module_level=True)

from engine.bf16_host import HOPPER, QUACK, launches_fixture  # noqa: F401
from engine.hopper_host import host_passes, native_fixture  # noqa: F401
from engine.test_engine_mxfp8 import mx_gemms_fixture  # noqa: F401
from kernels.needs import NVCC
from oracle.case import AXES, Case, covering
from oracle.engines import broken_on_host, chosen_on_host
from oracle.faces import ON_HOST, normal
from oracle.laws import JUMPS

pytestmark = NVCC
# Codes of y1s in place of values, and narrow rows of two roundings; sums of dz as it is stored.
FP8 = {"down.a": 0.05, "db1": 0.01, "else": 4e-3}
BF16 = {"down.a": 8e-3, "db1": 1.2e-2, "else": 1e-3}
# Additions in another order make a rounding to bf16, and behind it a code, the next one here and
# there; a rounding of z passes a clamp.
MX = {"dx": 6e-3, "dw1": 6e-3, "else": 2e-3}
MX_ACROSS_A_JUMP = MX | {"dx": 0.2, "dw1": 0.2}
# Plain GEMMs add an adapter's part to z that is rounded, which passes a clamp now and then.
BESIDE = {"else": 2.0}
PARTS = 3


@pytest.fixture(autouse=True)
def engines_by_name(monkeypatch):
    """A host may choose them, too."""
    chosen_on_host(monkeypatch)


@cache
def cases(engine: str) -> list[Case]:
    return covering(partial(normal, engine=engine + ON_HOST))


def with_every_value(among: list[Case]) -> list[Case]:
    """The first that has a value of an axis, for each value."""
    first = {(name, getattr(case, name)): case for case in reversed(among) for name in AXES}
    return list(dict.fromkeys(first.values()))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("engine", "launches"),
    [("hopper", HOPPER), ("bf16", HOPPER), ("mxfp8", QUACK)],
    indirect=["launches"],
)
def test_every_pair_of_values(engine, launches, part, request):
    if engine == "mxfp8":
        request.getfixturevalue("mx_gemms")
    check(engine, launches, cases(engine)[part::PARTS])


@pytest.mark.parametrize("launches", [QUACK], indirect=True)
def test_every_value_with_the_gemms_of_other_architectures(launches):
    """`test_every_pair_of_values` has every pair of the layer around these GEMMs."""
    check("bf16", launches, with_every_value(cases("bf16")))


@pytest.mark.parametrize("launches", [HOPPER], indirect=True)
def test_sizes_are_known_when_copies_keep_one_order_beside_biases(launches):
    line = (
        "recipe=dx256 dtype=bfloat16 copies=True bias=True arrangement=native gradients=main_grad"
    )
    check("hopper", launches, [Case.parse(f"{line} schedule=crossed sizes=70x256x128x4x3")])


def bars_of(case, engine, launches):
    if engine == "mxfp8":
        return MX_ACROSS_A_JUMP if case.activation in JUMPS else MX
    if launches.kind == QUACK and case.adapters != "none":
        return BESIDE
    return FP8 if engine == "hopper" else BF16


def check(engine, launches, chosen):
    wrong = {}
    for case in chosen:
        found = broken_on_host(case, engine, bars_of(case, engine, launches))
        wrong |= {str(case): found} if found else {}
    assert not wrong
