"""docs/design.md, "From a call to its first kernel": its table names everything that the modules
around a layer remember between calls.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = "layer", "functional", "node", "weights", "gradients"
ALONE = ("engine/footprint.py",)
CACHES = re.compile(r"\b(lru_cache|cache|Decided)\b")
CONTAINERS = re.compile(
    r"(\{\}|set\(|Weak\w*(\[.*\])?\(|weakref\.Weak\w+\(|dict\(|functools\.lru_cache\()"
)


def sources():
    for folder in FOLDERS:
        yield from sorted((ROOT / "sonicmoe" / folder).glob("*.py"))
    yield from (ROOT / "sonicmoe" / path for path in ALONE)


def remembered_in(path):
    """Containers that a module fills, and functions whose answers it keeps."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            if any(CACHES.search(ast.unparse(each)) for each in node.decorator_list):
                yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if CONTAINERS.match(ast.unparse(node.value)):
                yield ast.unparse(target)


def test_the_table_names_all_of_it():
    text = (ROOT / "docs" / "design.md").read_text()
    rows = text.split("| remembered |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    found = [f"{path.stem}.{name}" for path in sources() for name in remembered_in(path)]
    assert sorted(named) == sorted(found)
