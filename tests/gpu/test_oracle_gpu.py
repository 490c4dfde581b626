"""The cases of tests/oracle on the engines of a GPU: within the bars of the golden, and the laws of bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle.case import GATED, Case, covering
from oracle.faces import normal
from oracle.golden import ROUTERS
from oracle.laws import broken

pytestmark = pytest.mark.gpu
# Whole blocks, ragged rows, an expert of few rows.
SIZES = ((300, 512, 256, 8, 2), (37, 256, 128, 4, 3), (1, 512, 256, 8, 4), (0, 256, 128, 4, 2))
ENGINES = {
    "hopper": {
        "recipe": ("dx256",),
        "save_z": ("adaptive", "int8", "bf16"),
        "activation": tuple(GATED),
    },
    "bf16": {"recipe": ("none",)},
    "triton": {"recipe": ("none",)},
}
PARTS = 10


def normal_on(engine: str, case: Case) -> Case:
    """The case with what the engine has in the place of what it has not."""
    sizes = SIZES[case.seed % len(SIZES)]
    case = replace(case, sizes=sizes, dtype="bfloat16", iso_weight=False)
    case = case if case.face not in ROUTERS else replace(case, face="stacked")
    for name, values in ENGINES[engine].items():
        if getattr(case, name) not in values:
            case = replace(case, **{name: values[case.seed % len(values)]})
    if case.law == "memory":
        case = replace(case, law="repeat")  # tests/gpu/kernel_checks.py fills the memory of a GPU
    return replace(normal(case), dtype="bfloat16")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_of_values(engine, part):
    wrong = {}
    for case in covering(lambda case: normal_on(engine, case))[part::PARTS]:
        found = broken(case, engine)
        wrong |= {str(case): found} if found else {}
    assert not wrong
