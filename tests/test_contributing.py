"""Every recipe of docs/recipes works as it is printed, on a copy of the tree: the tests that it
names pass, and the test of the page that should follow asks for it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from kernels.needs import NVCC
from processes import ROOT

COPIED = ("sonicmoe", "ernie_compat", "tests", "docs", "benchmarks", "tools")
SINGLE_FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
# Compiled Python files come along: each names the size and the time of its source, so that a file
# which a step changes is compiled anew, and only that one.
NOT_COPIED = shutil.ignore_patterns("*.png", "data")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Recipe:
    """On the copy, the tests that `asked` selects from these files must pass, and so must a program as one more
    test; the test `follows` of a page must fail.
    """

    tests: tuple[str, ...]
    asked: str
    page: str
    follows: str
    program: str = ""


FLAG = """
import logging, torch
from sonicmoe.config import current_config
from sonicmoe.ernie_compat.deepep_metadata import deepep_topk_to_sonic_metadata as build
os.environ["SONIC_MOE_WARN_WORST_CASE"] = "yes"
assert current_config().warn_worst_case
said = []
logging.getLogger("sonicmoe").addFilter(lambda record: said.append(record.getMessage()) or True)
for counts in (None, None, [1]):
    build(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 1, counts)
assert said == ["no tokens_per_expert: rows take their worst case"], said
"""
KERNEL = """
from sonicmoe.engine.compile_plan import warm_up_plan
from sonicmoe.jit.plan import ModelSpec
for precision in ("fp8", "bf16"):
    names = {job.name for job in warm_up_plan(ModelSpec(8, 3072, 1536), precision).jobs}
    assert ("row_maxima" in names) == (precision == "fp8")
"""
ARCHITECTURE = """
from sonicmoe.engine.capabilities import BF16, HOPPER, problem
from sonicmoe.engine.compile_plan import warm_up_plan
from sonicmoe.jit.plan import ModelSpec
from kernels.gemm_matrix import TARGETS, few_variants
assert problem(BF16, None, "sm_110a") is None
words = "the architecture is sm_110a, and its kernels are for sm_90a"
assert str(problem(HOPPER, None, "sm_110a")).startswith(words)
planned = warm_up_plan(ModelSpec(8, 3072, 1536, arch="sm_110a"), "bf16")
assert {job.key().arch for job in planned.jobs} == {"sm_110a"}
(target,) = (target for target in TARGETS if target[0] == "sm_110a")
(kernel,) = few_variants(*target)
found = kernel.name, kernel.arch, dict(kernel.statics)["family"]
assert found == ("bf16_dgated", "sm_110a", "sm100"), found
"""
ACTIVATION = """
import torch
from sonicmoe.engine.activations import activate
from sonicmoe.engine.capabilities import BF16, HOPPER, REFERENCE, Workload, problem
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.quant.recipes import RECIPES
new = ActivationType("qgeglu")
assert is_glu(new)
for record, recipe in ((HOPPER, RECIPES["dx256"]), (BF16, None), (REFERENCE, None)):
    assert problem(record, Workload(EngineSettings(new, recipe), 64, 64), None) is None
z = torch.randn((5, 12), dtype=torch.float64)
gate, up = z[:, ::2], z[:, 1::2]
by_hand = gate / (1 + torch.exp(-1.702 * gate)) * up
assert torch.allclose(activate(z, new), by_hand)
"""
# The tests of the device code list its structs by hand.
DEVICE_CODE = "tests/kernels/test_sm90_activations.py"
DEVICE_CASE = '"qgeglu": (ActivationType.QGEGLU, "QuickGelu", {}),'
ENGINE_TESTS = "tests/engine/test_capabilities.py"
RECIPES = {
    "A new flag": Recipe(
        ("tests/test_config.py",), "WORST_CASE or covered", "tests/test_config.py", "page_is_up", FLAG
    ),
    "A new kernel": Recipe(
        ("tests/test_import_hygiene.py", "tests/kernels/test_row_maxima_on_host.py",
         "tests/kernels/test_cuda_sources.py"),
        "layer or upward or row_maxima",
        "tests/cli/test_documented_commands.py", "compiles_what_its_page_says", KERNEL,
    ),
    "A new architecture": Recipe(
        (), "", ENGINE_TESTS, "the_table_of_the_engines_is_that_of_the_records", ARCHITECTURE
    ),
    "A new activation": Recipe(
        ("tests/engine/test_engine_activations.py", ENGINE_TESTS,
         "tests/engine/test_engine_select.py", "tests/kernels/test_sm90_activations.py",
         "tests/kernels/test_cute_facts.py"),
        "qgeglu or ActivationsOfRecords or never_picks or epilogues",
        ENGINE_TESTS, "table", ACTIVATION,
    ),
}  # fmt: skip
# Recipes of one row are carried out on one copy. The first two share an interpreter, because they change
# different pages.
TOGETHER = [
    pytest.param(("A new flag", "A new activation"), marks=pytest.mark.slow),
    pytest.param(("A new kernel",), marks=[pytest.mark.slow, *NVCC]),
    ("A new architecture",),
]


@dataclass(frozen=True)
class Step:
    """A block of code under a line that is the path of a file: the whole file, or a change of it
    (`diff`: kept lines, added ones and removed ones, found by their text).
    """

    path: str
    language: str
    code: str


def steps(recipe: str) -> list[Step]:
    """Every step of a recipe; a block without a path of its own belongs to the path before it."""
    page = ROOT / "docs" / "recipes" / f"{recipe.rsplit(maxsplit=1)[-1]}.md"
    title, section = page.read_text(encoding="utf-8").split("\n", 1)
    assert title == f"# {recipe}"
    found, path = [], ""
    for named, language, code in re.findall(
        r"^(?:`([\w./]+)`:\n|```(\w+)\n(.*?)^```)", section, flags=re.M | re.S
    ):
        path = named or path
        if language:
            found.append(Step(path, language, code))
    assert found, f"{recipe} has no steps"
    return found


def copy_of_the_tree(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
    for name in SINGLE_FILES:
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def carry_out(step: Step, tree: Path) -> None:
    """Write the file of a step, or change it; a change must fit at exactly one place."""
    path = tree / step.path
    if step.language != "diff":
        assert not path.exists(), f"{step.path} is there already"
        path.write_text(step.code, encoding="utf-8")
        return
    lines = step.code.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{step.path} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on the copy: `sonicmoe`, `ernie_compat` and the tests come from there."""
    path = os.pathsep.join((str(tree), str(tree / "tests")))
    return processes.run(arguments, {**os.environ, "PYTHONPATH": path}, tree, timeout=TIMEOUT_S)


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_recipes(names: tuple[str, ...], tmp_path: Path) -> None:
    recipes, tree = [RECIPES[name] for name in names], copy_of_the_tree(tmp_path)
    for name in names:
        for step in steps(name):
            carry_out(step, tree)
    tests = {path for recipe in recipes for path in recipe.tests}
    if DEVICE_CODE in tests:
        text = (tree / DEVICE_CODE).read_text()
        (tree / DEVICE_CODE).write_text(text.replace("CASES = {", f"CASES = {{{DEVICE_CASE}", 1))
    programs = "".join(
        f"def test_{number}():{textwrap.indent(recipe.program, '    ')}"
        for number, recipe in enumerate(recipes)
    )
    (tree / "tests" / "test_the_program.py").write_text(f"import os\n{programs}")
    words = [word for recipe in recipes for word in (recipe.asked, recipe.follows) if word]
    asked = " or ".join(["test_the_program", *words])
    pages = {recipe.page: recipe.follows for recipe in recipes}
    files = dict.fromkeys((*tests, *pages, "tests/test_the_program.py"))
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-rpfE", "-k", asked)
    done = python(tree, *options, *files)
    ends = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)::(.*)", done.stdout, flags=re.M)
    # The tests of the pages fail, because each has to list the new thing, and no other test does.
    for_page = [(end, path in pages and pages[path] in name) for end, path, name in ends]
    assert set(for_page) == {("FAILED", True), ("PASSED", False)}, done.stdout + done.stderr
    failed = {path.partition("::")[0] for end, path, _ in ends if end == "FAILED"}
    assert failed == set(pages)
    passed = {path.partition("::")[0] for end, path, _ in ends if end == "PASSED"}
    assert passed >= {"tests/test_the_program.py", *tests} - {*pages}
    assert done.stdout.count("PASSED tests/test_the_program.py") == len(recipes)


def test_a_new_activation_changes_five_files_of_the_package() -> None:
    """As its page says."""
    paths = {step.path for step in steps("A new activation")}
    assert len([path for path in paths if path.startswith("sonicmoe/")]) == 5
