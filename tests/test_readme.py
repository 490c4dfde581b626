"""The README keeps its promises: its example runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import preloaded
import pytest
from worlds import environment

from sonicmoe.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.paddle
def test_example_runs_and_trains_every_expert() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    check = (
        "for expert in experts:\n"
        "    for linear in (expert.up_gate_proj, expert.down_proj):\n"
        "        grad = getattr(linear.weight, 'main_grad', None)\n"
        "        grad = linear.weight.grad if grad is None else grad\n"
        "        assert grad.shape == linear.weight.shape and float(grad.abs().sum()) > 0\n"
        "assert out.shape == x.shape and bool(paddle.isfinite(out).all())\n"
        "print('trained')\n"
    )
    result = preloaded.run(
        "paddle", ["-c", f"{example}\n{check}"], environment(), ROOT, timeout=240
    )
    assert result.stdout.endswith("trained\n"), result.stderr


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_named_commands_exist() -> None:
    assert set(re.findall(r"^sonicmoe (\w+)", README, flags=re.MULTILINE)) <= set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(
        f"\n{name}:" in makefile for name in re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    )


def test_at_most_a_hundred_lines() -> None:
    assert len(README.splitlines()) <= 100
