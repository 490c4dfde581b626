"""Who may import a framework, and where: a program must still be able to choose between PyTorch and Paddle's torch proxy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sonicmoe.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sonicmoe"
FRAMEWORKS = {"torch", "paddle"}

# The border to the frameworks: imports torch in a function so that it can say what is missing, and runs it at module level.
LAZY_TORCH_ALLOWED = {PACKAGE / "interop.py"}


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*({FRAMEWORKS!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["sonicmoe", "sonicmoe.config", "sonicmoe.quant.recipes", "sonicmoe.diagnostics.doctor", "sonicmoe.cli.main"],
)
def test_module_imports_no_framework(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_commands_import_no_framework() -> None:
    """Loading a subcommand must not choose a framework: its options do."""
    assert loaded_by("; ".join(f"import sonicmoe.cli.{name}" for name in COMMANDS)) == set()


def test_the_check_sees_a_framework() -> None:
    assert "torch" in loaded_by("import sonicmoe.interop")


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []


def lazy_torch_imports(source: str) -> list[int]:
    """Line numbers of `import torch` inside function bodies: under Paddle's proxy those may find the real torch."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = {
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if any(name.split(".")[0] == "torch" for name in imported_modules(node))
    }
    return sorted(lines)


def test_no_function_imports_torch() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in LAZY_TORCH_ALLOWED and (lines := lazy_torch_imports(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_lazy_import_is_recognised() -> None:
    source = "import torch\ndef f():\n    if x:\n        from torch.nn import functional\n    import torchvision\n"
    assert lazy_torch_imports(source) == [4]
    assert lazy_torch_imports("class C:\n    async def f(self):\n        import torch as t\n") == [3]


def module_level_frameworks(source: str) -> set[str]:
    """Frameworks a module imports when it is imported itself; blocks under `if TYPE_CHECKING` do not count."""
    tree = ast.parse(source)
    statements = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    names = {name.split(".")[0] for node in statements for name in imported_modules(node)}
    return names & FRAMEWORKS


def test_command_modules_name_no_framework_at_top_level() -> None:
    offenders = {
        path.name: found
        for path in (PACKAGE / "cli").glob("*.py")
        if (found := module_level_frameworks(path.read_text(encoding="utf-8")))
    }
    assert offenders == {}
