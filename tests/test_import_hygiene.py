"""Who may import a framework, and where: a program must still be able to choose between PyTorch and
Paddle's torch proxy.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import processes
from processes import ROOT

from sonicmoe.cli.main import COMMANDS, module_of

PACKAGE = ROOT / "sonicmoe"
FRAMEWORKS = {"torch", "paddle"}

# The border to the frameworks: imports torch in a function so that it can say what is missing, and
# runs it at module level.
LAZY_TORCH_ALLOWED = {PACKAGE / "interop.py"}

# The two imports that lead upward (docs/design.md, "The tree"): `dump` of a node and of a `MoE`.
DUMP = PACKAGE / "diagnostics" / "capture.py"
LAZY_DOORS = {(PACKAGE / "node" / "upkeep.py", DUMP), (PACKAGE / "moe.py", DUMP)}


def loaded_by(statement: str, among: set[str] = FRAMEWORKS) -> set[str]:
    program = f"import sys; {statement}; print(*({among!r} & set(sys.modules)))"
    result = processes.of_checkout("-c", program)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_these_import_no_framework() -> None:
    """Loading a subcommand must not choose a framework: its options do."""
    modules = ["sonicmoe", "sonicmoe.config", "sonicmoe.quant.recipes"]
    modules += ["sonicmoe.diagnostics.doctor", "sonicmoe.cli.main"]
    modules += [*map(module_of, COMMANDS), "ernie_compat.trainer"]
    assert loaded_by("; ".join(f"import {module}" for module in modules)) == set()


def test_warm_up_imports_no_framework_and_no_compiler() -> None:
    modules = [f"jit.{name}" for name in ("cuda_source", "triton_variant", "parallel")]
    modules += ["jit", "jit_warmup", "cli.warmup", "kernels.blackwell.cute_kernel"]
    modules += ["engine.capabilities", "engine.compile_plan"]
    program = "; ".join(f"import sonicmoe.{module}" for module in modules)
    assert loaded_by(program, FRAMEWORKS | {"triton", "tvm_ffi", "cutlass", "numpy"}) == set()


def test_the_torch_face_loads_no_compiler_and_the_lazy_doors_are_lazy() -> None:
    """Most programs neither compile nor dump, so they load no compiler and no diagnosis."""
    program = "from sonicmoe import MoE, count_cumsum; from sonicmoe.ernie_compat import SonicMoEMlpNode"  # fmt: skip
    assert loaded_by(program, {"torch", "torch._dynamo", "sonicmoe.diagnostics"}) == {"torch"}
    for path, target in LAZY_DOORS:
        assert target in repository_imports(path, path.read_text(encoding="utf-8"))


parsed = cache(ast.parse)  # every check reads every source


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    absolute = isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
    return [node.module] if absolute else []


def is_for_types(node: ast.AST) -> bool:
    """An `if TYPE_CHECKING`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def lazy_torch_imports(source: str) -> list[int]:
    """Line numbers of `import torch` inside function bodies: under Paddle's proxy those may find
    the real torch.
    """
    lines = {
        node.lineno
        for function in ast.walk(parsed(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if any(name.split(".")[0] == "torch" for name in imported_modules(node))
    }
    return sorted(lines)


def test_no_function_imports_torch() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in LAZY_TORCH_ALLOWED
        and (lines := lazy_torch_imports(path.read_text(encoding="utf-8")))
    }
    assert found == {}
    assert all(lazy_torch_imports(path.read_text(encoding="utf-8")) for path in LAZY_TORCH_ALLOWED)


@cache
def layers() -> list[tuple[Path, int]]:
    """Paths of the tree in docs/design.md, each with the number of its line in the table; the
    longest first.
    """
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = design.split("## The tree")[1].split("\n## ")[0]
    rows = [
        line.split("|")[1] for line in tree.splitlines() if line.startswith("| ") and "`" in line
    ]
    listed = [
        ((ROOT if row.strip().startswith("top-level") else PACKAGE) / name, number)
        for number, row in enumerate(rows)
        for name in re.findall(r"`([^`]+)`", row)
    ]
    return sorted(listed, key=lambda entry: -len(entry[0].parts))


@cache
def layer_of(path: Path) -> int | None:
    return next(
        (number for listed, number in layers() if path == listed or listed in path.parents), None
    )


def file_of(module: str) -> Path | None:
    """The file of a module of this repository, or of the package it is a name of."""
    path = ROOT.joinpath(*module.split("."))
    found = [
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
        path.parent / "__init__.py",
    ]
    return next((candidate for candidate in found if candidate.exists()), None)


def repository_imports(path: Path, source: str, *, with_types: bool = False) -> set[Path]:
    """Files of this repository that `source`, as the text of `path`, imports anywhere, inside
    functions too; under `if TYPE_CHECKING` only `with_types`.
    """
    package = list(path.relative_to(ROOT).parent.parts)
    tree = parsed(source)
    guarded = {
        id(inner) for node in ast.walk(tree) if is_for_types(node) for inner in ast.walk(node)
    }
    modules = []
    for node in ast.walk(tree):
        if id(node) in guarded and not with_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            modules += [".".join(filter(None, [*base, alias.name])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A circle is one however its modules are imported.
            modules += [name.value for name in node.args[:1] if isinstance(name, ast.Constant)]
    ours = [module for module in modules if module.split(".")[0] in {"sonicmoe", "ernie_compat"}]
    return {
        found for module in ours if (found := file_of(module)) and found != PACKAGE / "__init__.py"
    }


def upward_imports(path: Path, source: str) -> list[str]:
    own = layer_of(path)
    assert own is not None, f"{path} is in no line of the tree in docs/design.md"
    targets = {target: layer_of(target) for target in repository_imports(path, source)}
    return sorted(
        str(target.relative_to(ROOT))
        for target, layer in targets.items()
        if (layer is None or layer > own) and (path, target) not in LAZY_DOORS
    )


def product_files() -> list[Path]:
    return [path for top in (PACKAGE, ROOT / "ernie_compat") for path in sorted(top.rglob("*.py"))]


def test_files_import_from_their_own_layer_and_below() -> None:
    found = {
        str(path.relative_to(ROOT)): upward
        for path in product_files()
        if path != PACKAGE / "__init__.py"
        and (upward := upward_imports(path, path.read_text(encoding="utf-8")))
    }
    assert found == {}
    above = "def f():\n    from ..engine import interface"
    assert upward_imports(PACKAGE / "quant" / "gpu.py", above) == ["sonicmoe/engine/interface.py"]


def import_graph(sources: Mapping[Path, str]) -> dict[Path, set[Path]]:
    """Who imports whom: lazy imports and those for type checkers count."""
    return {
        path: repository_imports(path, source, with_types=True) - {path}
        for path, source in sources.items()
    }


def import_cycles(graph: Mapping[Path, set[Path]]) -> list[list[str]]:
    """Groups of files that reach each other, by repeated removal of files without imports left."""
    left = {path: set(targets) for path, targets in graph.items()}
    while free := {path for path, targets in left.items() if not targets & left.keys()}:
        left = {path: targets for path, targets in left.items() if path not in free}
    importers = {path: {p for p, targets in left.items() if path in targets} for path in left}
    while free := {path for path, users in importers.items() if not users & importers.keys()}:
        importers = {path: users for path, users in importers.items() if path not in free}
    names = sorted(str(path.relative_to(ROOT)) for path in importers)
    return [names] if names else []


def test_no_import_leads_back_to_where_it_came_from() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in product_files()}
    sources.pop(PACKAGE / "__init__.py")  # its names are loaded on first use
    assert import_cycles(import_graph(sources)) == []
    sources[PACKAGE / "errors.py"] += "def f():\n    from . import moe"
    assert "sonicmoe/errors.py" in import_cycles(import_graph(sources))[0]


def folder_of(path: Path) -> Path:
    """The folder of the package that a file is in, or the file itself where it is in none."""
    top = PACKAGE if PACKAGE in path.parents else ROOT
    return top / path.relative_to(top).parts[0]


def folder_graph(sources: Mapping[Path, str]) -> dict[Path, set[Path]]:
    """Which folder imports which when a program runs: imports inside functions count, those for
    type checkers do not, and neither do the lazy doors.
    """
    graph: dict[Path, set[Path]] = {folder_of(path): set() for path in sources}
    for path, source in sources.items():
        targets = {t for t in repository_imports(path, source) if (path, t) not in LAZY_DOORS}
        graph[folder_of(path)] |= {folder_of(target) for target in targets} - {folder_of(path)}
    return graph


def test_no_folder_imports_one_that_imports_it() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in product_files()}
    sources.pop(PACKAGE / "__init__.py")
    assert import_cycles(folder_graph(sources)) == []
    sources[PACKAGE / "quant" / "gpu.py"] += "def f():\n    from ..engine import select"
    assert "sonicmoe/quant" in import_cycles(folder_graph(sources))[0]
