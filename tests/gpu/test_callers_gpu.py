"""Public calls on the GPU engines never write into their caller's tensors, where a kernel's stray
write would be a storage's changed byte; and nothing of a forward or backward waits for the device.

The node's own modes are in test_hopper_node_gpu.py.
"""

from __future__ import annotations

import callers_tensors as callers
import pytest
from callers_tensors import SPELLINGS, check_face, check_node, given
from gpu.device import compiled_beforehand, waiting_is_an_error
from pairwise import pairwise

from sonicmoe import SonicMoEConfig

pytestmark = pytest.mark.gpu

FACES = [face for face in callers.FACES if face != "MoE, plain"]


def config_of(engine, **changes):
    """By name: a fallback would wait or prove nothing, and say so in the log alone."""
    mode = "perf" if engine == "hopper" else "off"
    return SonicMoEConfig(**{"fp8_mode": mode, "engine": engine} | changes)


ENGINES = ("hopper", "bf16")
CONFIGS = [config_of("hopper"), config_of("hopper", fp8_wgrad=False), config_of("bf16")]
WAYS = ({}, {"flush": "step"})
NODES = [
    *((engine, {}, options) for engine in ENGINES for options in WAYS),
    ("hopper", {"fp8_mode": "mem"}, {}),
    ("hopper", {"fp8_wgrad": False}, {}),
    ("hopper", {"iso_weight": True, "recompute_z": True}, {}),
]
# A compiler waits, too.
SIZES = callers.E, callers.H, callers.I
compiled = compiled_beforehand(*((config, SIZES) for config in CONFIGS))


@pytest.mark.parametrize(("face", "spelling", "engine"), pairwise(FACES, SPELLINGS, ENGINES))
def test_calls_leave_their_callers_tensors_alone(face, engine, spelling):
    with config_of(engine).activate():
        check_face(face, given("cuda", spelling), engine == "hopper")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("engine", "changes", "options"), NODES, ids=str)
def test_the_node_writes_main_grad_alone(engine, changes, options, spelling):
    check_node(given("cuda", spelling), config_of(engine, **changes), **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("face", FACES)
def test_the_pytorch_face_waits_for_nothing(face, engine):
    """Training and inference calls of the functional API and of `MoE`."""
    with config_of(engine).activate():
        _, call = callers.FACES[face](given("cuda"), engine == "hopper")
        call()  # allocates, and loads kernels
        with waiting_is_an_error():
            for _ in range(2):
                results = call()
    assert all(bool(result.any()) for result in results), "computed nothing"
