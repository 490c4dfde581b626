"""The engines of a GPU over kernels that a host computes ("hopper on host")."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.case import Case
from oracle.faces import ENGINES, ON_HOST, run
from oracle.golden import scene_of
from oracle.laws import broken

from sonicmoe.engine import select


def chosen_on_host(patch: pytest.MonkeyPatch) -> None:
    """Have a host choose an engine that a case asks for by name."""
    refused = select._refused
    patch.setattr(
        select, "_refused", lambda n, *of: None if n.value in ENGINES else refused(n, *of)
    )


def broken_on_host(case: Case, engine: str, bars: dict[str, float]) -> list[str]:
    """`broken` over kernels of the host, and what is further from the reference engine than its bar."""
    scene = scene_of(case)
    found, wanted = run(case, scene, engine + ON_HOST), run(case, scene)
    wrong = broken(case, engine + ON_HOST, found, scene)
    for name, got in found.items():
        error = np.linalg.norm(got - wanted[name]) / (np.linalg.norm(wanted[name]) or 1.0)
        if not error <= bars.get(name, bars["else"]):
            wrong.append(f"{name} is {error:.3g} from the reference engine's")
    return wrong
