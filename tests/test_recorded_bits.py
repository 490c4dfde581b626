"""Every output and gradient has the recorded bits: the cases whose sums are exact, which any
processor can check. `tools/ci/recorded_bits.py` checks the others too.
"""

from __future__ import annotations

import processes
import pytest

TOOL = processes.ROOT / "tools/ci/recorded_bits.py"


@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=pytest.mark.paddle)])
def test_exact_cases_have_the_recorded_bits(framework):
    result = processes.of_checkout(TOOL, "--framework", framework, "--portable")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert f"{framework}: " in result.stdout and " cases have the recorded bits" in result.stdout


def test_another_bit_is_named_with_its_case(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import recorded_bits

    found, wanted = {"one": {"out": "0", "dx": "1"}}, {"one": {"out": "0", "dx": "f"}}
    assert recorded_bits.differences(found, wanted, "here") == ["here: other bits in dx: one"]
