"""`sonicmoe verify`: this package's faces pass every check, each check finds its fault, and the page
shows what the command prints.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from diagnostics.planted_experts import FAULTS, plain, through_transformers

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.cases import Sizes
from sonicmoe.diagnostics.experts_under_test import Subject, load
from sonicmoe.diagnostics.verify import CHECKS, FAILED, NOT_RUN, PASSED, verify
from sonicmoe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "experts_to_verify.py"
SMALL = Sizes(tokens=260, hidden=32, intermediate=16, experts=4, topk=2)
FACES = {
    "definition": Subject(plain, sizes=SMALL),
    "functional in fp8": Subject(load(f"{EXAMPLES}:sonicmoe_fp8"), tolerance=0.15, sizes=SMALL),
    "transformers": Subject(through_transformers, dtype="bfloat16", sizes=SMALL),
    "transformers in fp8": Subject(
        partial(through_transformers, implementation="sonicmoe_fp8"), tolerance=0.15, sizes=SMALL
    ),
}
ELSEWHERE = {"FSDP2", "beyond 2^31 elements"}  # checks of other processes and of a GPU


def states(subject):
    findings = [verify(name, subject) for name in CHECKS if name not in ELSEWHERE]
    return {finding.check: (finding.state, finding.detail) for finding in findings}


@pytest.mark.parametrize("face", FACES)
def test_every_check_passes(face):
    found = states(FACES[face])
    assert {state for state, _ in found.values()} == {PASSED}, found
    assert {verify(name, FACES[face]).state for name in ELSEWHERE} == {NOT_RUN}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_its_fault(fault):
    experts, check = FAULTS[fault]
    assert verify(check, Subject(experts, sizes=SMALL)).state == FAILED
    if fault not in {"turned", "unsteady", "drops"}:
        assert verify("values", Subject(experts, sizes=SMALL)).state == PASSED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "needed: package.module:function"),
        ("math:nothing", "AttributeError"),
        ("no/file.py:f", "FileNotFoundError"),
        ("math:pi", "needed: a callable"),
    ],
)
def test_what_is_no_callable_is_named(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(name)


def test_the_page_shows_what_the_command_prints(monkeypatch):
    """grouped_mm under FSDP2 too; details are those of another processor."""
    page = (ROOT / "docs" / "verify.md").read_text()
    (block,) = re.findall(
        r"^\$ (sonicmoe verify \S+:grouped_mm[^\n]*)\n(.*?)^```", page, re.M | re.S
    )
    words, table = block
    shown = dict(re.findall(r"^(\S.*?) {2,}(pass|FAIL|not run) ", table, re.M))
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, [*words.split()[1:], "--device", "cpu", "--json"])
    assert done.exit_code == 1, done.output
    assert {found["check"]: found["state"] for found in json.loads(done.stdout)} == shown
