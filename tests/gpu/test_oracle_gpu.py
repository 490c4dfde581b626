"""The cases of tests/oracle on the engines of a GPU: within the bars of the golden, the laws of bits, and
steps that wait for nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

import numpy as np
import pytest
import torch
from gpu.device import waiting_is_an_error
from oracle.case import Case, covering
from oracle.faces import LAYERS, Call, everywhere, normal, run
from oracle.golden import Scene, scene_of
from oracle.laws import JUMPS, Found, broken

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.interop import empty

pytestmark = pytest.mark.gpu
PARTS = 40
engines = pytest.mark.parametrize("engine", ["hopper", "bf16", "triton"])


@cache
def covering_set(engine: str) -> list[Case]:
    return covering(partial(normal, engine=engine))


@pytest.mark.parametrize("part", range(PARTS))
@engines
def test_every_pair_of_values(engine, part):
    cases = covering_set(engine)[part::PARTS]
    wrong = [f"{case}: {words}" for case in cases for words in found_wrong(case, engine)]
    assert not wrong, "\n".join(wrong)


def found_wrong(case: Case, engine: str) -> list[str]:
    try:
        scene = scene_of(case)
        found = run(case, scene, engine)
        return [*broken(case, engine, found), *far_from_the_emulation(case, scene, found)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


# FP8 codes are 6 to 12 % wide: values that differ by 1e-3 disagree in 1 % of the codes. Beside a jump a
# code of z that flips turns an entry of dz on or off. The gradient of `down.a` reads codes of y1s.
CLOSE, AT_A_JUMP, OF_CODES = 0.04, 0.08, 0.1


def far_from_the_emulation(case: Case, scene: Scene, found: Found) -> list[str]:
    """What of an FP8 step is further from the reference engine's than the order of sums explains."""
    if not case.fp8 or case.scene != "usual":
        return []
    emulated, wrong = run(case, scene), []
    few = 1 + 8 / max(int(scene.valid.sum()), 1) ** 0.5  # few slots are few draws, and no average
    for name, got in found.items():
        close = OF_CODES if name == "down.a" else AT_A_JUMP if case.activation in JUMPS else CLOSE
        error = np.linalg.norm(got - emulated[name]) / (np.linalg.norm(emulated[name]) or 1.0)
        if not error <= close * few:
            wrong.append(f"{name} is {error:.3g} from the emulation; at most {close * few:.3g}")
    return wrong


def test_the_memory_of_every_scratch_is_poisoned():
    """Law `memory` takes it for granted."""
    with memory_full_of_nan("cuda"):
        made = empty((4096,), torch.uint8, torch.device("cuda", 0))
        assert bool((made == 0xFF).all())


# Of the other faces the oracle's own code waits.
STEPS = [
    *("gradients=main_grad", "gradients=main_grad flush=step", "gradients=main_grad counts=list"),
    "arrangement=fused gradients=main_grad recompute_z=True",
    "arrangement=native bias=True adapters=both save_z=bf16",
    "gradients=unset iso_weight=True recompute_z=True stagewise_memory=True",
    "gradients=main_grad fp8_wgrad=False",
    *("face=stacked", "face=stacked arrangement=halves bias=True", "face=transformers"),
    "face=fleet gradients=main_grad counts=list",
]


@pytest.mark.parametrize("line", STEPS)
@engines
def test_nothing_waits_for_the_device(engine, line):
    case = normal(Case.parse(f"{line} dtype=bfloat16 recipe=dx256"), engine)
    scene = scene_of(case)
    layer = LAYERS[case.face](case, scene, engine)
    with nullcontext() if case.face == "node" else everywhere(layer.config):
        # Over the first steps the guard of a forgotten step() compares values; a compiler waits, too.
        for _ in range(3):
            call = Call(layer, scene)
            call.backward()
            layer.finish()
        call.leaf.grad = None
        with waiting_is_an_error():
            for _ in range(2):
                call.value = call.call(call.leaf, call.probs)
                call.backward()
                layer.finish()
    assert bool(call.value.any()) and bool(call.leaf.grad.any()), "computed nothing"


@pytest.mark.parametrize(
    "wait", [torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.nonzero], ids=lambda f: f.__name__
)
def test_a_wait_would_be_seen(wait):
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        wait(torch.ones(1, device="cuda"))
