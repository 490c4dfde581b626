"""A step on a GPU that finds no memory: one allocation after the other fails, its call is made again, and
every bit is that of an undisturbed step.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracle.case import Case
from oracle.faces import Trial, run
from oracle.golden import scene_of

pytestmark = pytest.mark.gpu

# No products: every mode, arrangement and destination has a case. Where nothing else is said, FP8 adds
# straight into `main_grad`, per-expert BF16 has memory of its own for one backward, and plain operations
# flush to memory that is turned.
LINES = {
    "hopper": (
        "gradients=main_grad schedule=two",
        "gradients=main_grad flush=step schedule=two",
        "gradients=main_grad places=turned",
        "gradients=main_grad fp8_wgrad=False arrangement=native",
        "gradients=unset recompute_z=True stagewise_memory=True",
        "arrangement=fused stagewise_memory=True",
    ),
    "bf16": (
        "gradients=main_grad schedule=two",
        "gradients=main_grad arrangement=native stagewise_memory=True",
        "gradients=unset recompute_z=True flush=step",
    ),
}


@pytest.mark.parametrize(
    ("engine", "line"), [(engine, line) for engine, lines in LINES.items() for line in lines]
)
def test_every_allocation_may_fail(engine, line):
    recipe = "dx256" if engine == "hopper" else "none"
    case = Case.parse(f"{line} recipe={recipe} dtype=bfloat16 sizes=150x256x128x4x2")
    scene = scene_of(case)
    run(case, scene, engine)  # makes what is made once per process
    wanted = run(case, scene, engine, counted := Trial())
    assert counted.errors == [] and min(counted.seen[:2]) > 0, counted.seen
    for call, made in enumerate(counted.seen):
        for number in range(made):
            found = run(case, scene, engine, trial := Trial([None] * call + [number]))
            (error,) = trial.errors  # a fault that nobody notices would be a fallback
            assert "out of memory in the " in error and "To need less: fewer tokens" in error
            for name in wanted:
                assert np.array_equal(found[name], wanted[name]), (call, number, name, error)
