"""The cases of tests/oracle on the engines of a GPU: within the bars of the golden, the laws of bits, and
steps that wait for nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from gpu.device import waiting_is_an_error
from oracle.case import AXES, Case, covering, lines
from oracle.faces import (
    ENGINES,
    LAYERS,
    Call,
    Transformers,
    everywhere,
    host,
    normal,
    run,
)
from oracle.golden import Scene, scene_of
from oracle.laws import JUMPS, Found, broken

from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan
from sonicmoe.interop import empty
from sonicmoe.kernels.sm90 import gathers_first

pytestmark = pytest.mark.gpu
PARTS = 24
engines = pytest.mark.parametrize("engine", ["hopper", "bf16", "triton"])


def few_kernels(case: Case, engine: str) -> Case:
    """The case as the engine has it, and so that all cases need few kernels, because a compiler takes
    seconds for each. Kernels are made for an activation and for other properties, such as adapters. Here
    every activation runs without those, and each combination of those runs with one activation.
    """
    case = normal(case, engine)
    half, adapted = case.dtype == "float16", case.adapters != "none"
    # Rows that are gathered before the GEMMs have kernels of their own, which would double the others.
    # Another seed takes another size.
    if gathers_first(case.sizes[2]) and (half or adapted or case.bias):
        case = normal(replace(case, seed=case.seed + 1), engine)
    if engine == "hopper":
        number = 3 * adapted + ("adaptive", "bf16", "int8").index(case.save_z)
    elif engine == "bf16":
        # These laws have weights of experts apart, too.
        apart = case.arrangement in ("per_expert", "numbered") or case.law in (
            "face",
            "arrangement",
        )
        number = 4 * half + 2 * adapted + (apart or gathers_first(case.sizes[2]))
    else:
        place = (256, 264).index(case.sizes[1]) if case.sizes[1] in (256, 264) else 2
        number = 6 * half + 3 * case.bias + place
    if number:
        has = ENGINES[engine].get("activation", AXES["activation"])
        # SwiGLU first, with which other tests have weights of experts apart, and z in BF16.
        known = sorted({*has} & {*Transformers.ACTIVATIONS}, reverse=True)
        first = (number - 1) % len(known)
        taken = LAYERS[case.face].takes.get("activation", known)
        found = next(name for name in known[first:] + known[:first] if name in taken)
        case = replace(case, activation=found, own=case.own and engine != "triton")
    return normal(case, engine)


@cache
def covering_set(engine: str, folder: Path) -> list[Case]:
    """The first worker that asks makes it for all."""
    made = folder / f"cases of {engine}"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            cases = covering(partial(few_kernels, engine=engine))
            made.write_text("\n".join(map(str, cases)), encoding="utf-8")
    return [Case.parse(line) for line in lines(made.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("part", range(PARTS))
@engines
def test_every_pair_of_values(engine, part, session_folder):
    cases = covering_set(engine, session_folder)[part::PARTS]
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


# Counts around a tile, a long sum, and more experts than tokens choose.
LINES = [
    *(f"sizes={tokens}x256x128x2x1 routing=one" for tokens in (127, 128, 129, 257, 4095, 32768)),
    "sizes=300x256x128x520x2 routing=sentinels",
]
# Sizes of public models, and of no tile; Triton compiles for each.
OF_MODELS = ("130x2880x2880x2x1", "130x2048x1408x3x2")
SIZES = {
    "hopper": (*OF_MODELS, "300x16x64x3x2", "300x144x1088x3x2"),
    "bf16": (*OF_MODELS, "300x64x8x3x2", "300x1032x520x3x2"),
    "triton": OF_MODELS[1:],
}
# More experts than one launch has tensor maps for, whose gradients are added to memory of their own.
MANY = [
    f"sizes={sizes} arrangement=per_expert gradients=main_grad law=recompute routing=sentinels"
    for sizes in ("700x400x64x40x3", "1500x272x64x260x2")
]


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (engine, line)
        for engine, sizes in SIZES.items()
        for line in (*LINES, *(f"sizes={size}" for size in sizes))
    ]
    + [("hopper", line) for line in MANY],
)
def test_sizes_that_no_covering_set_has(engine, line):
    recipe = "dx256" if engine == "hopper" else "none"
    case = Case.parse(f"arrangement=native {line} dtype=bfloat16 recipe={recipe}")
    assert not found_wrong(case, engine)


def one_case(line: str, engine: str) -> tuple[Case, Scene]:
    case = few_kernels(Case.parse(f"{line} dtype=bfloat16 recipe=dx256"), engine)
    return case, scene_of(case)


@engines
def test_inference_gives_the_bits_of_training(engine):
    case, scene = one_case("face=stacked routing=sentinels", engine)
    layer = LAYERS[case.face](case, scene, engine)
    with everywhere(layer.config):
        call = Call(layer, scene)
        with torch.no_grad():
            found = call.call(call.leaf, call.probs)
    assert np.array_equal(host(found), call.out)


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
    case, scene = one_case(line, engine)
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


def test_a_wait_would_be_seen():
    for wait in (torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.nonzero):
        with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
            wait(torch.ones(1, device="cuda"))
