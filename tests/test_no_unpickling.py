"""Nothing that is read from disk, from a cache or from the network is unpickled: unpickling runs
code that the writer chose.

docs/security.md promises this. The sources are searched for every function of the installed
libraries that unpickles, under whatever name it was imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT

SEARCHED = ("sonicmoe", "ernie_compat", "benchmarks", "examples", "tools")
# Modules that unpickle in every reading function that they have.
MODULES = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "multiprocessing", "torch.multiprocessing", "jsonpickle", "pandas",
}  # fmt: skip
# Functions that unpickle unless the argument has the value; None: always.
FUNCTIONS: dict[str, tuple[str, object] | None] = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "numpy.lib.format.read_array": ("allow_pickle", False),
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    "paddle.load": None,
    "torch.package.PackageImporter": None,
    "torch.hub.load": None,
    "torch.hub.load_state_dict_from_url": ("weights_only", True),
    "torch.distributed.checkpoint.load": None,
}
# Collectives that pickle an object on one rank and unpickle it on another.
COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
# Module: the uses that are none of these.
ALLOWED = {
    # The pipe to a worker that this process has started with its own interpreter and code. Nobody
    # else holds an end of it.
    "sonicmoe/engine/trial.py": ["pickle", "pickle.load"],
    "sonicmoe/engine/trial_process.py": ["pickle"],
    # Ranks that a program itself starts, with its own code.
    "benchmarks/rank_processes.py": ["torch.multiprocessing"],
    # Threads, to which nothing is sent.
    "examples/on_cpu/for_megatron.py": ["multiprocessing.dummy"],
    # A weak reference to an allocation; nothing is sent.
    "sonicmoe/weights/stacked_cache.py": ["torch.multiprocessing.reductions"],
}


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of `a.b.c` after the imports of the file; "" for another expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else node.attr
    return ""


def belongs_to(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def is_safe(call: ast.Call, wanted: tuple[str, object] | None) -> bool:
    """Whether the call has the argument that forbids pickles."""
    if wanted is None:
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    value = given.get(wanted[0])
    return isinstance(value, ast.Constant) and value.value is wanted[1]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """`(name in the file, full name)`, imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
                yield "", alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield "", node.module or ""
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def unpicklers(source: str) -> list[str]:
    """Full names of what unpickles, or could, in a file."""
    tree = ast.parse(source)
    found_imports = list(imports(tree))
    names = {name: full for name, full in found_imports if name}
    found = [full for name, full in found_imports if not name and belongs_to(full, MODULES)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func, names)
            # A dump is no danger, because the reader at the other end is looked at.
            reads = belongs_to(name, MODULES) and name.rpartition(".")[2] in ("load", "loads")
            if reads or (name in FUNCTIONS and not is_safe(node, FUNCTIONS[name])):
                found.append(name)
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, names)
            if name.rpartition(".")[2] in COLLECTIVES:
                found.append(name)
    return sorted(found)


def sources() -> list[Path]:
    return [path for folder in SEARCHED for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_source_unpickles() -> None:
    paths = sources()
    assert len(paths) > 150
    found = {
        str(path.relative_to(ROOT)): uses
        for path in paths
        if (uses := unpicklers(path.read_text(encoding="utf-8")))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch as t\nt.load(path, weights_only=flag)",
        "from torch import load as read\nread(path)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "def f():\n    from pickle import loads\n    return loads(data)",
        "import shelve",
        "from multiprocessing import Pipe",
        "import yaml\nyaml.load(text)",
        "import torch.distributed as dist\ndist.all_gather_object(out, value)",
        "from torch.distributed import broadcast_object_list as send\nsend(values)",
        "import paddle\npaddle.load(path)",
        "import importlib, joblib",
    ],
)
def test_each_of_these_is_found(source: str) -> None:
    assert unpicklers(source)
