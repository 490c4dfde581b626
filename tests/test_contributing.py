"""Every recipe of CONTRIBUTING.md works as it is printed, on a copy of the tree."""

from __future__ import annotations

import importlib.util
import re

import pytest
from recipes import carry_out, copy_of_the_tree, passes, pytest_on, python, steps

from sonicmoe.engine.capabilities import BF16, problem
from sonicmoe.jit.toolchain import find_toolkit

GATE = "tests/kernels/test_cuda_sources.py"
PLANNED = """
from sonicmoe.engine.compile_plan import warm_up_plan
from sonicmoe.jit.plan import ModelSpec
for precision in ("fp8", "bf16"):
    names = {job.name for job in warm_up_plan(ModelSpec(8, 3072, 1536), precision).jobs}
    print(precision, "row_maxima" in names)
"""

USED = """
import logging; logging.basicConfig(format="%(message)s")
import torch
from sonicmoe import SonicMoEConfig
from sonicmoe.config import current_config
from sonicmoe.diagnostics.doctor import examine_flags, Report
from sonicmoe.ernie_compat.deepep_metadata import deepep_topk_to_sonic_metadata as build
ids, probs = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
report = Report()
in_force = examine_flags(report, {"SONIC_MOE_WARN_WORST_CASE": "on"})
print(current_config().warn_worst_case, in_force.warn_worst_case, report.flags[-1])
build(ids, probs, 1)
build(ids, probs, 1, [1])
with SonicMoEConfig(warn_worst_case=False).activate():
    build(ids, probs, 1)
"""


def test_a_new_flag(tmp_path, monkeypatch):
    tree = copy_of_the_tree(tmp_path)
    for step in steps("A new flag"):
        carry_out(step, tree)
    page = (str(tree / "tools/ci/generate_env_docs.py"),)
    assert python(tree, *page, "--check").returncode == 1
    assert python(tree, *page).returncode == 0
    assert "| `SONIC_MOE_WARN_WORST_CASE` | `warn_worst_case` | 0, 1 | `0` | warn where" in (
        tree / "docs/env.md"
    ).read_text(encoding="utf-8")

    monkeypatch.setenv("SONIC_MOE_WARN_WORST_CASE", "yes")
    used = python(tree, "-c", USED)
    listed = "FlagState(name='SONIC_MOE_WARN_WORST_CASE', value='1', source='environment')"
    assert used.stdout == f"True True {listed}\n", used.stderr
    assert used.stderr.count("no tokens_per_expert: rows take their worst case") == 1
    monkeypatch.setenv("SONIC_MOE_WARN_WORST_CASE", "loud")
    refused = python(tree, "-m", "sonicmoe", "numerics", "--list")
    wanted = "Error: SONIC_MOE_WARN_WORST_CASE='loud' is not understood; needed: 0 or 1"
    assert (refused.returncode, refused.stderr.strip()) == (2, wanted)
    monkeypatch.delenv("SONIC_MOE_WARN_WORST_CASE")

    passes(tree, "tests/test_config.py", "-k", "not outdated")
    typed = "from sonicmoe.config import current_config\n\nreveal_type(current_config().{})\n"
    (tree / "typed.py").write_text(typed.format("warn_worst_case"), encoding="utf-8")
    # mypy reads what the answer depends on and nothing else: PyTorch alone takes it ten seconds.
    read = ("typed.py", *(f"sonicmoe/{name}.py" for name in ("__init__", "flags", "config")))
    checked = python(tree, "-m", "mypy", "--follow-imports=skip", *read)
    assert re.search(r'Revealed type is "(builtins\.)?bool"', checked.stdout), checked.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
@pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")
def test_a_new_kernel(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    for step in steps("A new kernel"):
        carry_out(step, tree)
    planned = python(tree, "-c", PLANNED)
    assert planned.stdout == "fp8 True\nbf16 False\n", planned.stderr
    pages = ("tests/test_import_hygiene.py", "tests/kernels/test_row_maxima_on_host.py", GATE)
    passes(tree, *pages, "-k", "layer or upward or row_maxima")

    # The page that lists the kernels is asked to follow.
    result = pytest_on(
        tree, "tests/cli/test_documented_commands.py", "-k", "compiles_what_its_page_says"
    )
    assert result.returncode == 1, result.stdout


ARCHITECTURE = """
import sys
from sonicmoe.engine.capabilities import BF16, HOPPER, problem
from sonicmoe.engine.compile_plan import warm_up_plan
from sonicmoe.jit.plan import ModelSpec
for record in (BF16, HOPPER):
    print(record.name.value, problem(record, None, "sm_110a"))
planned = warm_up_plan(ModelSpec(8, 3072, 1536, arch="sm_110a"), "bf16")
print(planned.precision, {job.key().arch for job in planned.jobs})
sys.path.append("tests")
from kernels.gemm_matrix import TARGETS, few_variants
gate = [kernel for target in TARGETS if target[0] == "sm_110a" for kernel in few_variants(*target)]
print(*((kernel.name, kernel.arch, dict(kernel.statics)["family"]) for kernel in gate))
"""


def test_a_new_architecture(tmp_path):
    assert "its kernels are for sm_90a" in str(problem(BF16, None, "sm_110a"))
    tree = copy_of_the_tree(tmp_path)
    for step in steps("A new architecture"):
        carry_out(step, tree)
    asked = python(tree, "-c", ARCHITECTURE)
    assert asked.returncode == 0, asked.stderr
    served, refused, planned, gate = asked.stdout.splitlines()
    assert served == "bf16 None", asked.stderr
    assert refused.startswith("hopper the architecture is sm_110a, and its kernels are for sm_90a")
    assert planned == "bf16 {'sm_110a'}"
    assert gate == "('bf16_dgated', 'sm_110a', 'sm100')"
    # The page that lists what engines serve is asked to follow.
    page = "tests/engine/test_capabilities.py"
    result = pytest_on(tree, page, "-k", "test_the_table_of_the_engines_is_that_of_the_records")
    assert result.returncode == 1, result.stdout


ACTIVATION = """
import torch
from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.engine.capabilities import BF16, HOPPER, REFERENCE, Workload, problem
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.quant.recipes import RECIPES

new = ActivationType("qgeglu")
for record, recipe in ((HOPPER, RECIPES["dx256"]), (BF16, None), (REFERENCE, None)):
    print(record.name.value, problem(record, Workload(EngineSettings(new, recipe), 64, 64), None))

z = torch.randn((5, 12), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
dy1 = torch.linspace(-1, 2, 30, dtype=torch.float64).reshape(5, 6)
y1, _ = activate_backward(z, dy1, new)
gate, up = z[:, ::2], z[:, 1::2]
by_hand = gate / (1 + torch.exp(-1.702 * gate)) * up
print(is_glu(new), bool(torch.allclose(y1, by_hand)), bool(torch.equal(y1, activate(z, new))))
"""
CASES = "tests/kernels/test_sm90_activations.py"
CASE = '    "qgeglu": (ActivationType.QGEGLU, "QuickGelu", {}),\n'


@pytest.mark.slow
def test_a_new_activation(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    recipe = steps("A new activation")
    product = {step.path for step in recipe if step.path.startswith("sonicmoe/")}
    assert len(product) <= 4, product
    for step in recipe:
        carry_out(step, tree)
    computed = python(tree, "-c", ACTIVATION)
    wanted = "hopper None\nbf16 None\nreference None\nTrue True True\n"
    assert computed.stdout == wanted, computed.stderr
    pages = (
        f"tests/engine/test_{n}.py" for n in ("engine_activations", "capabilities", "engine_select")
    )
    cases = tree / CASES
    cases.write_text(cases.read_text().replace("CASES = {\n", f"CASES = {{\n{CASE}", 1))
    asked = "qgeglu or ActivationsOfRecords or never_picks or epilogues"
    passes(tree, *pages, CASES, "tests/kernels/test_cute_facts.py", "-k", asked)

    # The page with the table of the engines is asked to follow.
    result = pytest_on(tree, "tests/engine/test_capabilities.py", "-k", "table")
    assert result.returncode == 1 and "`situ_glu`, `qgeglu`" in result.stdout, result.stdout
