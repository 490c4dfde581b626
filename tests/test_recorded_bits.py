"""Every output and gradient has the recorded bits: the cases whose sums are exact, which any
processor can check. `tools/ci/recorded_bits.py` checks the others too.
"""

from __future__ import annotations

import processes
import pytest

TOOL = processes.ROOT / "tools/ci/recorded_bits.py"


def test_exact_cases_have_the_recorded_bits(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import recorded_bits

    code = recorded_bits.check("torch", portable=True, recording=False)
    said = capsys.readouterr().out
    assert code == 0 and " cases have the recorded bits" in said, said
    found, wanted = {"one": {"out": "0", "dx": "1"}}, {"one": {"out": "0", "dx": "f"}}
    assert recorded_bits.differences(found, wanted, "here") == ["here: other bits in dx: one"]


@pytest.mark.paddle
def test_exact_cases_have_the_recorded_bits_under_paddle():
    result = processes.of_checkout(TOOL, "--framework", "paddle", "--portable")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "paddle: " in result.stdout and " cases have the recorded bits" in result.stdout
