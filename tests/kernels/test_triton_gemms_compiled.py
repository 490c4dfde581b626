"""The Triton GEMMs compile for every architecture without its GPU, and no register of theirs is
spilled; keys depend on sizes of the model alone.
"""

from __future__ import annotations

import importlib.util

import processes
import pytest
from framework import IS_PADDLE

if IS_PADDLE or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton under PyTorch", allow_module_level=True)

from kernels.triton_report import compiled, problems

from sonicmoe.enums import ActivationType
from sonicmoe.kernels.triton.tilings import PRODUCTS, TILINGS
from sonicmoe.kernels.triton.variants import (
    GRADIENT_DTYPES,
    ExpertShape,
    all_variants,
    variant,
    wgrad_layouts,
)

SWIGLU = ActivationType.SWIGLU
TRAINING = {"store_z": True, "store_y1": True}
# A choice for the gate: each product, each architecture, each kind of epilogue.
FEW = (
    ("sm_80", "up", TRAINING),
    ("sm_80", "dgated", {}),
    ("sm_86", "down", {}),
    ("sm_89", "wgrad_up", {"gradient": "float32", "step_m": 1}),
    ("sm_90a", "dgated", {}),
    ("sm_90a", "dgrad", {}),
    ("sm_90a", "wgrad_down", {"gradient": "float32", "step_m": 0}),
)


def shape(arch, activation=SWIGLU, **options):
    return ExpertShape(3072, 1536, activation, arch=arch, **options)


# Children of a process that has imported everything and hashed nothing.
KEYS = """
import os
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.triton.variants import ExpertShape, all_variants
for order in (lambda jobs: jobs, reversed):
    if os.fork() == 0:
        jobs = all_variants(ExpertShape(512, 256, ActivationType.SWIGLU, arch="sm_90a"))
        for job in order(jobs):
            print(job.name, dict(job.statics), job.key())
        print("end", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_key_does_not_depend_on_what_else_the_process_has_hashed():
    """A warm-up compiles each kernel in a process that knows no other; a step launches all."""
    done = processes.of_checkout("-c", KEYS)
    assert done.returncode == 0, done.stderr
    *listed, nothing = (part.splitlines() for part in done.stdout.split("end\n"))
    one, other = listed
    assert len(one) > 10 and one == other[::-1] and not nothing


def check(job, artefacts):
    wrong = problems(job, compiled(job, artefacts))
    assert not wrong, (job.name, job.arch, wrong)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "product", "choices"), FEW, ids=[f"{arch} {name}" for arch, name, _ in FEW]
)
def test_compiles_without_spills(arch, product, choices, artefacts):
    check(variant(product, shape(arch), **choices), artefacts)


@pytest.mark.kernels
@pytest.mark.every_variant
@pytest.mark.parametrize("arch", TILINGS)
def test_every_variant_compiles_without_spills(arch, artefacts):
    jobs = []
    for activation in ActivationType:
        jobs += all_variants(shape(arch, activation, bias=True), recompute_z=True)
        jobs += [variant("up", shape(arch, activation), **TRAINING)]
    jobs += all_variants(shape(arch, dtype="float16"), recompute_z=True)
    # Where no tile divides H and I, and where the table's narrow tiles are chosen.
    for sizes in ((200, 72), (2880, 2880), (2048, 640)):
        jobs += all_variants(ExpertShape(*sizes, SWIGLU, arch=arch))
    for job in dict.fromkeys(jobs):
        check(job, artefacts)


def test_the_tables_cover_every_product():
    """A tile's rows, and rows that wgrad contracts over at a time, divide those of an expert."""
    for table in TILINGS.values():
        assert set(table) == set(PRODUCTS)
        for tiling in (tiling for tilings in table.values() for tiling in tilings):
            assert 128 % tiling.m == 0 and 128 % tiling.k == 0, tiling


def test_wgrad_is_compiled_for_every_layout():
    gated = [job for job in all_variants(shape("sm_80")) if "wgrad" in job.name]
    assert len(gated) == len(GRADIENT_DTYPES) * len(list(wgrad_layouts(shape("sm_80"))))
    assert {dict(job.statics)["step_m"] for job in gated} == {0, 1, 2}
    assert {job.key().arch for job in gated} == {"sm_80"}
