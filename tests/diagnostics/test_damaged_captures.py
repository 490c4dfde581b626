"""Files of calls that a disk or a stranger has changed: read, or
refused in one line.
"""

import dataclasses

import numpy as np
import pytest
from damage import variants
from numerics_cases import load_case, make_case

from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.step_dump import Caller, StepSettings, save_dump
from sonicmoe.errors import SonicMoEError

PLAIN = make_case("gaussian", CaseSizes(tokens=4, hidden=8, intermediate=8, experts=2, topk=1), 0)
# As a functional call leaves it.
CASE = dataclasses.replace(
    PLAIN,
    b1=np.ones((2, 16), np.float32),
    b2=np.ones((2, 8), np.float32),
    settings=StepSettings(activation="swiglu_oai", activation_parameters={"limit": 2.0}),
    caller=Caller({"w1": ("up", "gate"), "x": ("x",)}, "model.layer"),
)


def test_a_damaged_file_is_read_or_refused(tmp_path, request):
    path, count = tmp_path / "case.npz", request.config.getoption("--attacks")
    save_dump(path, CASE)
    refused = 0
    for number, (kind, content) in enumerate(variants(path.read_bytes(), 3, count)):
        path.write_bytes(content)
        try:
            load_case(path)
        except SonicMoEError as error:
            refused += 1
            assert str(path) in str(error), f"{kind}, case {number}"
        except Exception as error:
            pytest.fail(f"{kind}, case {number}: {type(error).__name__}: {error}")
    assert refused > count / 2
