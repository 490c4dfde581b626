"""`sonicmoe verify`: this package's faces pass every check, each check finds its fault, and the page
shows what the command prints.
"""

from __future__ import annotations

import gc
import json
import re
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
from click.testing import CliRunner
from diagnostics.planted_experts import FAULTS, plain, through_transformers
from processes import ROOT

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.experts_under_test import ExpertsUnderTest, load, memory_full_of_nan
from sonicmoe.diagnostics.verify import CHECKS, FAILED, NOT_RUN, PASSED, verify
from sonicmoe.errors import ConfigError

EXAMPLES = ROOT / "examples" / "experts_to_verify.py"
SMALL = CaseSizes(tokens=260, hidden=32, intermediate=16, experts=4, topk=2)
FACES = {
    "definition": ExpertsUnderTest(plain, sizes=SMALL),
    "functional in fp8": ExpertsUnderTest(
        load(f"{EXAMPLES}:sonicmoe_fp8"), tolerance=0.15, sizes=SMALL
    ),
    "transformers": ExpertsUnderTest(through_transformers, dtype="bfloat16", sizes=SMALL),
    "transformers in fp8": ExpertsUnderTest(
        partial(through_transformers, implementation="sonicmoe_fp8"), tolerance=0.15, sizes=SMALL
    ),
}
PLANTED = Path(__file__).with_name("planted_experts.py")


@pytest.fixture(scope="module", autouse=True)
def _no_module_was_sharded():
    """A process that has sharded a module keeps no codes of weights, and other tests of this process
    ask for those.
    """
    yield
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fully_shard

    _fully_shard.cls_to_fsdp_cls.clear()
    gc.collect()
    assert not FSDPModule.__subclasses__()


@pytest.mark.parametrize("face", FACES)
def test_every_check_passes(face):
    found = {name: verify(name, FACES[face]) for name in CHECKS}
    assert found.pop("beyond 2^31 elements").state == NOT_RUN, "it needs a GPU"
    assert {finding.state for finding in found.values()} == {PASSED}, found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_its_fault(fault):
    experts, check = FAULTS[fault]
    assert verify(check, ExpertsUnderTest(experts, sizes=SMALL)).state == FAILED
    if fault not in {"turned", "unsteady", "drops"}:
        assert verify("values", ExpertsUnderTest(experts, sizes=SMALL)).state == PASSED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "needed: package.module:function"),
        ("math:nothing", "math has no callable 'nothing'; needed: one of ['acos', "),
        ("math:sqrrt", "math has no callable 'sqrrt'; did you mean 'sqrt'?"),
        ("no/file.py:f", "FileNotFoundError"),
        ("math:pi", "math has no callable 'pi'"),
        (f"{PLANTED}:sonicmoe", "no callable 'sonicmoe'; needed: one of ['"),
    ],
)
def test_what_is_no_callable_is_named(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tolerance nan", "tolerance is nan; needed: a finite number above 0"),
        ("--tolerance inf", "tolerance is inf"),
        ("--tolerance 0", "tolerance is 0.0"),
        ("--device gpu", "device is 'gpu' (Expected one of "),
        ("--device meta", "device is 'meta' ("),
        ("--activation-parameter limit=7", "activation_parameters has 'limit'"),
    ],
)
def test_bad_input_is_refused_and_no_failed_check(options, words):
    done = CliRunner().invoke(main, ["verify", f"{PLANTED}:plain", *options.split()])
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""


def test_a_callable_that_ends_the_process_has_failed(tmp_path):
    experts = tmp_path / "experts.py"
    experts.write_text("import sys\nquits = lambda *_: sys.exit(0)\n")
    chosen = "--device=cpu", "--check=values", "--check=FSDP2"
    done = CliRunner().invoke(main, ["verify", f"{experts}:quits", *chosen])
    assert done.exit_code == 1 and "2 of 2 checks failed" in done.stdout
    experts.write_text("import sys\nsys.exit(0)\n")
    done = CliRunner().invoke(main, ["verify", f"{experts}:quits"])
    assert done.exit_code == 2 and "cannot be loaded (SystemExit: 0)" in done.stderr


def test_output_of_the_callable_is_no_data(tmp_path):
    """It prints when it is loaded, in a call, and as the process ends."""
    experts = tmp_path / "experts.py"
    experts.write_text(
        "import atexit\nfrom diagnostics.planted_experts import plain\nprint('loaded')\n"
        "atexit.register(print, 'bye')\n"
        "def talks(*given):\n    print('[1]')\n    return plain(*given)\n"
    )
    words = ["verify", f"{experts}:talks", "--device=cpu", "--check=values", "--check=FSDP2"]
    done = processes.of_checkout("-m", "sonicmoe", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert [found["state"] for found in json.loads(done.stdout)] == [PASSED, PASSED]
    assert {"loaded", "[1]", "bye"} <= set(done.stderr.splitlines())


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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fills", [False, True])
def test_switches_are_as_before_memory_was_full_of_nan(deterministic, fills, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with memory_full_of_nan("cpu"):
            assert bool(torch.isnan(torch.empty(5)).all())
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)
