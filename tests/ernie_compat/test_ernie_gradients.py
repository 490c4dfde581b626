"""Which way the experts' gradients take in the main job: straight into the memory that the optimizer
reads, with the losses and weights of a run whose nodes collect them for `step()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import SIZES, run_program, trained_by

PROGRAM = """
import json, sys
from small_run import trained_by
text, parts = sys.argv[1], int(sys.argv[2])
print(json.dumps([trained_by("paddle", text, flush, parts) for flush in (None, "step")]))
"""
DIRECT = "expert weight gradients are added straight into main_grad"
# dw1 and dw2 of every expert of the one MoE layer, in fp32.
ACCUMULATORS = 4 * SIZES.num_experts * 3 * SIZES.hidden_size * SIZES.intermediate_size


@pytest.fixture(params=["torch", pytest.param("paddle", marks=pytest.mark.paddle)])
def both(request: pytest.FixtureRequest, text: Path) -> Any:
    """(as the model has it, with `flush="step"`) of so many micro-batches."""

    def run(parts: int) -> Any:
        if request.param == "paddle":
            return run_program(PROGRAM, str(text), str(parts))
        return [trained_by("torch", text, flush, parts) for flush in (None, "step")]

    return run


@pytest.mark.parametrize("parts", [1, 2])
def test_nodes_hold_none_and_say_so_and_the_bits_are_equal(both: Any, parts: int) -> None:
    """Gradients are zero before the first micro-batch, so both ways add in the same order."""
    direct, step = both(parts)
    assert direct["held"] == 0 and direct["said"] == [DIRECT]
    assert step["held"] == ACCUMULATORS and step["said"] == []
    assert direct["losses"] == step["losses"]
    assert direct["learned"] == step["learned"]
    assert max(direct["losses"]) - min(direct["losses"]) > 0.1
