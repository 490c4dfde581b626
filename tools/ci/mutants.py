#!/usr/bin/env python3
"""Draw mutants of the library, plant one after the other, and see which test catches each.

    tools/ci/mutants.py                        # 60 of this tree by seed 1, one at a time
    tools/ci/mutants.py --count 5 --only engine/targets.py --seed 7
    tools/ci/mutants.py --draw                 # only what would be planted
    tools/ci/mutants.py --again                # those of mutants.toml that still fit this tree

A file is drawn by its number of lines, then one of its places: an operator, a number, a statement
that is dropped, two arguments that are swapped. tests/oracle runs first, then the tests of the
file's folder, those that name the module first, then other tests that name it; through Paddle the
oracle alone. mutants.toml holds what was found; `reason` there is written by people, where
nobody catches a mutant and nobody has to.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from planted_faults import LIBRARY, Tree

HERE = Path(__file__).resolve().parent
ROOT, TABLE = HERE.parents[1], HERE / "mutants.toml"
ORACLE = "tests/oracle"
AT_ONCE, MOST_OTHERS = 8, 8  # files of a run
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub,
    ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands in `file` once, becomes `new`. caught: by which test, "" where by none."""

    file: str
    function: str
    kind: str
    old: str
    new: str
    caught: str = ""
    framework: str = ""
    reason: str = ""


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every mutation of one node: its kind, and what stands there then."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in SWAPS:
        other.ops[0] = SWAPS[type(other.ops[0])]()
        yield "operator", other
    elif isinstance(other, ast.BinOp | ast.BoolOp) and type(other.op) in SWAPS:
        other.op = SWAPS[type(other.op)]()
        yield "operator", other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield "operator", other.operand
    elif isinstance(other, ast.Constant) and isinstance(other.value, int):
        yield (
            "bound",
            ast.Constant(not other.value if isinstance(other.value, bool) else other.value + 1),
        )
    elif isinstance(other, ast.Call) and len(other.args) > 1:
        first, second = other.args[:2]
        if ast.dump(first) != ast.dump(second) and not {type(first), type(second)} & {ast.Starred}:
            other.args[:2] = second, first
            yield "swapped", other
    elif _may_go(other):
        yield "dropped", ast.Pass()


def _may_go(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise)


def places(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Nodes inside functions, each with its function's name. Left out: annotations, decorators, and the
    words of errors."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "exc", "msg"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            here = f"{inside}.{node.name}".lstrip(".") if named else inside
            if here and not named:
                yield here, node
            yield from places(node, here)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of one file whose text can be told from the rest."""
    source, found = path.read_text(), []
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    for function, node in places(ast.parse(source)):
        for kind, other in changed(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(other)
            text = f"({text})" if isinstance(other, ast.BinOp | ast.BoolOp | ast.Compare) else text
            first, last = node.lineno - 1, node.end_lineno
            while source.count("".join(lines[first:last])) > 1 and first > 0:
                first -= 1  # lines before it tell it from its equals
            old = raw[starts[first] : starts[last]].decode()
            new = (raw[starts[first] : begin] + text.encode() + raw[end : starts[last]]).decode()
            if old != new and source.count(old) == 1:
                file = path.relative_to(ROOT).as_posix()
                found.append(Mutant(file, function, kind, old, new))
    return found


def drawn(count: int, seed: int, only: str) -> list[Mutant]:
    """Mutants of the library's Python files, a file by its lines."""
    rng = random.Random(seed)
    files = [path for folder in LIBRARY for path in sorted((ROOT / folder).rglob("*.py"))]
    known = {path: mutants_of(path) for path in files if only in path.as_posix()}
    known = {path: found for path, found in known.items() if found}
    sizes = [len(path.read_text().splitlines()) for path in known]
    chosen: dict[Mutant, None] = {}
    while len(chosen) < min(count, sum(map(len, known.values()))):
        chosen[rng.choice(known[rng.choices(list(known), sizes)[0]])] = None
    return list(chosen)


def tests_of(mutant: Mutant) -> list[tuple[list[str], str]]:
    """Runs of test files and their framework, the likeliest first; tests of a GPU and of other
    environments are left out.
    """
    parts = Path(mutant.file).with_suffix("").parts
    folder = parts[0] if parts[0] == "ernie_compat" else parts[1]
    names = re.compile(rf"\b({parts[-1]}|{mutant.function.split('.')[-1]})\b")
    scores = {
        path.relative_to(ROOT).as_posix(): len(names.findall(path.read_text()))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not {"gpu", "doors", "oracle"} & {*path.parts}
    }
    own = [name for name in scores if name.startswith(f"tests/{folder}/")]
    others = [name for name, score in scores.items() if score and name not in own]
    own, others = (sorted(names, key=lambda name: -scores[name]) for names in (own, others))
    runs = [own[first : first + AT_ONCE] for first in range(0, len(own), AT_ONCE)]
    runs += [others[:MOST_OTHERS]] if others else []
    through_both = [([ORACLE], "torch"), ([ORACLE], "paddle")]
    return [*through_both, *((tests, "torch") for tests in runs)]


def judged(mutant: Mutant, tree: Tree, temporary: Path) -> Mutant:
    """The mutant with the first test that fails on it; `reason` names runs that came to no end."""
    notes = []
    with tree.planted(mutant):
        for tests, framework in tests_of(mutant):
            failed, note = tree.failed_test(["-m", "not kernels", *tests], framework, temporary)
            notes += [note] if note else []
            if failed:
                return replace(mutant, caught=failed, framework=framework, reason="")
    return replace(mutant, caught="", framework="", reason="; ".join(notes) or mutant.reason)


def written(mutants: list[Mutant]) -> str:
    """The table's text. JSON's strings are TOML's."""
    tables = [
        "\n".join(
            f"{name} = {json.dumps(value)}" for name, value in asdict(mutant).items() if value
        )
        for mutant in mutants
    ]
    return "\n".join(f"[[mutant]]\n{table}\n" for table in tables)


def main() -> int:
    """Exit code 1 where a mutant is neither caught nor has a reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path has this text")
    parser.add_argument("--draw", action="store_true", help="run no test")
    parser.add_argument("--again", action="store_true", help="plant what mutants.toml has")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    if options.again:
        tables = tomllib.loads(TABLE.read_text())["mutant"]
        listed = [Mutant(**table) for table in tables]
        mutants = [m for m in listed if (ROOT / m.file).is_file()
                   and (ROOT / m.file).read_text().count(m.old) == 1]  # fmt: skip
        print(f"{len(mutants)} of {len(listed)} stand in this tree")
    else:
        mutants = drawn(options.count, options.seed, options.only)
    if options.draw:
        print(written(mutants))
        return 0
    done: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        Path(top).chmod(0o755)  # tests of other users enter it
        (Path(top) / "tmp").mkdir()
        tree = Tree(ROOT, Path(top) / "tree")
        for mutant in mutants:
            done.append(judged(mutant, tree, Path(top) / "tmp"))
            options.out.write_text(written(done))
            print(f"{len(done)}  {mutant.file}: {mutant.function}: {mutant.kind}: "
                  f"{done[-1].caught or 'NOBODY CATCHES IT'}", flush=True)  # fmt: skip
    return int(any(not mutant.caught and not mutant.reason for mutant in done))


if __name__ == "__main__":
    raise SystemExit(main())
