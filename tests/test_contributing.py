"""Every recipe of CONTRIBUTING.md works as it is printed, on a copy of the tree."""

from __future__ import annotations

import importlib.util

import pytest
from recipes import carry_out, copy_of_the_tree, passes, python, steps

from sonicmoe.jit.toolchain import find_toolkit

GATE = "tests/kernels/test_cuda_sources.py"
PLANNED = """
from sonicmoe.jit.plan import ModelSpec, warm_up_plan
for precision in ("fp8", "bf16"):
    names = {job.name for job in warm_up_plan(ModelSpec(8, 3072, 1536), precision).jobs}
    print(precision, "row_maxima" in names)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")
@pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")
def test_a_new_kernel(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    for step in steps("A new kernel"):
        carry_out(step, tree)
    planned = python(tree, "-c", PLANNED)
    assert planned.stdout == "fp8 True\nbf16 False\n", planned.stderr
    passes(tree, "tests/test_import_hygiene.py", "-k", "layer or upward")
    passes(tree, "tests/kernels/test_row_maxima_on_host.py")
    passes(tree, GATE, "-k", "row_maxima")

    # The gate sees what it is there for: a kernel whose values do not fit into its registers.
    source = tree / "sonicmoe/kernels/cuda/row_maxima.cu"
    text = source.read_text(encoding="utf-8")
    kept = "float kept[64];\n  for (int i = 0; i < 64; ++i) kept[i] = values[i];\n"
    used = "largest = fmaxf(largest, kept[threadIdx.x % 61]);\n"
    text = text.replace("  float largest = 0.f;\n", f"  {kept}  float largest = 0.f;\n  {used}")
    source.write_text(text, encoding="utf-8")
    result = python(tree, "-m", "pytest", "-q", GATE, "-k", "without_spills and row_maxima")
    assert result.returncode == 1 and "stack_bytes" in result.stdout, result.stdout

    # The page that lists the kernels is asked to follow.
    result = python(tree, "-m", "pytest", "-q", "tests/cli", "-k", "compiles_what_its_page_says")
    assert result.returncode == 1, result.stdout
