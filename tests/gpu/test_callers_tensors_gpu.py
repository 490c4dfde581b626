"""Public calls on the GPU engines never write into their caller's tensors; a kernel's stray write
would be a storage's changed byte.
"""

from __future__ import annotations

import os

import pytest
from callers_tensors import FACES, SPELLINGS, E, H, I, check_face, check_node, given
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.jit import no_compile
from sonicmoe.jit_warmup import warmup_jit

pytestmark = pytest.mark.gpu


def config_of(engine, **changes):
    """By name: a fallback would prove nothing."""
    return SonicMoEConfig(
        **{"fp8_mode": "perf" if engine == "hopper" else "off", "engine": engine} | changes
    )


ENGINES = ("hopper", "bf16")
NODES = [
    *(
        (engine, {}, options)
        for engine in ENGINES
        for options in ({}, {"flush": "step"}, {"flush": "step", "split_wgrad": True})
    ),
    ("hopper", {"fp8_mode": "mem"}, {}),
    ("hopper", {"fp8_wgrad": False}, {}),
    ("hopper", {"iso_weight": True, "recompute_z": True}, {}),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Nothing below may compile."""
    for config in (config_of("hopper"), config_of("hopper", fp8_wgrad=False), config_of("bf16")):
        assert warmup_jit(E, H, I, "cuda", config=config, jobs=os.cpu_count()).complete
    with no_compile():
        yield


@pytest.mark.parametrize(
    ("face", "spelling", "engine"),
    pairwise([face for face in FACES if face != "MoE, plain"], SPELLINGS, ENGINES),
)
def test_calls_leave_their_callers_tensors_alone(face, engine, spelling):
    with config_of(engine).activate():
        check_face(face, given("cuda", spelling), engine == "hopper")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("engine", "changes", "options"), NODES, ids=str)
def test_the_node_writes_main_grad_alone(engine, changes, options, spelling):
    check_node(given("cuda", spelling), config_of(engine, **changes), **options)
