"""The calls whose bits recorded_bits.py compares: cases of tests/oracle, each by its line.

`portable` says which of them give the same bits on any processor: their operands are small integers
and powers of two, so every sum is exact in fp32, whatever the order of its terms.
Set SONICMOE_TEST_FRAMEWORK before this is imported.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from framework import IS_PADDLE
from oracle.case import Case, covering
from oracle.faces import normal, run
from oracle.golden import WHOLE, scene_of

# Faces of both frameworks, and faces of PyTorch alone.
OF_BOTH, OF_TORCH = ("node", "sorted", "fleet"), ("stacked", "triples", "moe", "transformers")
ENGINES = ("hopper", "bf16", "triton")
EXACT_ACTIVATIONS = ("reglu", "relu", "relu_sq")
EXACT_RECIPES = ("none", "dx256-pow2", "iso128-pow2", "iso32-pow2", "1x128-pow2")
SIZES = (37, 256, 64, 4, 2)


def portable(case: Case) -> bool:
    """Whether the bits are the same on any processor."""
    return case.scene == WHOLE


def cpu_cases() -> Iterator[tuple[str, Case, str]]:
    """`(name, case, engine)` of everything that a host computes under this framework."""
    for faces in (OF_BOTH,) if IS_PADDLE else (OF_BOTH, OF_TORCH):
        for case in covering(partial(_of_faces, faces))[::3]:
            yield str(case), case, "reference"
        exact = [face for face in faces if face != "moe"]  # its router has a softmax
        found = covering(partial(_exact, exact))[::2]
        yield from ((str(case), case, "reference") for case in found)


def gpu_cases() -> Iterator[tuple[str, Case, str]]:
    """The cases of the engines that need a GPU."""
    for engine in ENGINES:
        for case in covering(partial(normal, engine=engine))[::3]:
            yield f"engine={engine} {case}", case, engine


def named(names: Iterable[str]) -> Iterator[tuple[str, Case, str]]:
    """The cases of recorded names, whatever axes have come since."""
    for name in names:
        first, _, rest = name.partition(" ")
        _, has_engine, engine = first.partition("engine=")
        yield name, Case.parse(rest if has_engine else name), engine or "reference"


def _of_faces(faces: tuple[str, ...], case: Case) -> Case:
    """The case through one of these faces; no law is tried."""
    face = faces[case.seed % len(faces)]
    return replace(normal(replace(case, face=face, law="repeat")), law="repeat")


def _exact(faces: list[str], case: Case) -> Case:
    """With operands of whole numbers, and nothing that rounds a sum."""
    case = _of_faces(tuple(faces), case)
    gates = EXACT_ACTIVATIONS[:1] if case.face == "fleet" else EXACT_ACTIVATIONS
    case = replace(
        case,
        activation=gates[case.seed % len(gates)],
        recipe=EXACT_RECIPES[case.seed % len(EXACT_RECIPES)],
        arrivals="plain", adapters="none", own=False, scene="usual", sizes=SIZES,
        trains="all" if case.trains == "codes" else case.trains,
    )  # fmt: skip
    return replace(normal(case), scene=WHOLE)


def results(case: Case, engine: str) -> dict[str, np.ndarray]:
    """Every output and gradient of a case, by name."""
    return run(case, scene_of(case), engine)


def digest(array: np.ndarray, *, signs: bool) -> str:
    """Eight hexadecimal digits of every bit. signs: whether a zero's sign counts; which zero a sum
    of zeros is depends on where a library starts it.
    """
    array = np.ascontiguousarray(array, np.float32)
    array = array if signs else array + np.float32(0.0)
    return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()[:8]
