#!/usr/bin/env python3
"""Plant one fault after the other into a copy of this tree, and see that some test catches each.

    tools/ci/planted_faults.py                      # every fault, two at a time
    tools/ci/planted_faults.py -n 8 --only routing  # those whose name or file has this text
    tools/ci/planted_faults.py --check              # only that each text stands where it should
    tools/ci/planted_faults.py --follow             # find the files that texts have moved to
    tools/ci/planted_faults.py --record             # write who caught what to planted_faults.json

planted_faults.toml lists the faults: where, which text becomes which, and the test files to try, the
likely ones first. A fault is run against those alone, and the first test that fails has caught it.
The recorded test is tried before them. In the end every test that caught a fault runs on the tree
as it is, where it must pass. Code that moves takes its fault along: the meaning stays, and `file`,
`old` and `new` follow. A text that does not stand there exactly once is an error.

Exit code 1 where nobody catches a fault, or an entry does not fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

HERE = Path(__file__).resolve().parent
LIST, CAUGHT = HERE / "planted_faults.toml", HERE / "planted_faults.json"
LIBRARY, SUFFIXES = ("sonicmoe", "ernie_compat"), {".py", ".cu", ".cuh", ".cpp", ".hpp"}
TIMEOUT_S = 400
FRAMEWORK = "SONICMOE_TEST_FRAMEWORK"
# Exit statuses of pytest: an argument that is no test, and every test deselected.
USAGE, NO_TESTS = 4, 5


@dataclass(frozen=True)
class Fault:
    """A change of one text that some test must notice.

    breaks: in words. tests: files, the likely ones first. framework: under which they run.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    framework: str = "torch"

    def problem(self, tree: Path) -> str | None:
        """Why this does not fit to the tree, or None."""
        target = tree / self.file
        if not target.is_file():
            return f"{self.file} is no file"
        count = target.read_text().count(self.old)
        if count != 1:
            return f"the text stands {count} times in {self.file}; needed: once"
        if self.old == self.new:
            return "nothing changes"
        missing = [test for test in self.tests if not (tree / test.split("::")[0]).is_file()]
        return f"no test files: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Outcome:
    """`test`: who caught the fault, None where nobody did. `note`: what else happened."""

    fault: Fault
    test: str | None
    seconds: float
    note: str = ""


def read_faults() -> list[Fault]:
    """The list, in its order."""
    tables = tomllib.loads(LIST.read_text())["fault"]
    faults = [Fault(**{**table, "tests": tuple(table["tests"])}) for table in tables]
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SystemExit(f"{LIST.name} names twice: {', '.join(sorted(twice))}")
    return faults


class Tree:
    """A copy of the tree that one fault at a time is planted into."""

    _writes = 0
    _lock = threading.Lock()

    def __init__(self, source: Path, folder: Path) -> None:
        self.path = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=source, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        for name in listed:
            if (source / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, folder / name)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """With the fault inside the block."""
        target = self.path / fault.file
        before = target.read_text()
        try:
            self._write(target, before.replace(fault.old, fault.new))
            yield
        finally:
            self._write(target, before)

    def _write(self, target: Path, text: str) -> None:
        target.write_text(text)
        # Python tells bytecode that is out of date by the seconds of this time and the size, and two
        # faults of one size may come within a second.
        with self._lock:
            Tree._writes += 1
            stamp = time.time() + 2 * Tree._writes
        os.utime(target, (stamp, stamp))

    def failed_test(self, tests: list[str], framework: str, temporary: Path) -> tuple[str, str]:
        """`(the first test that fails, a note)`; both empty where all pass."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            FRAMEWORK: framework,
            "TMPDIR": str(temporary),
        }
        # pytest's cache has the ids of failed tests as they are, whatever letters they hold.
        cache = self.path / ".pytest_cache"
        shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *tests]
        process = subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "", f"{' '.join(tests)} ran past {TIMEOUT_S} s"
        failed = cache / "v/cache/lastfailed"
        if failed.is_file():
            return next(iter(json.loads(failed.read_text()))), ""
        if process.returncode == USAGE and any("::" in test for test in tests):
            return "", ""  # a recorded test that has another name by now
        if process.returncode not in (0, NO_TESTS):
            return "", f"pytest ended with {process.returncode}: {output[-300:]}"
        return "", ""


def judge(fault: Fault, tree: Tree, known: str | None, temporary: Path) -> Outcome:
    """Run the tests of a fault until one catches it."""
    began, notes = time.monotonic(), []
    with tree.planted(fault):
        recorded = [known] if known and (tree.path / known.split("::")[0]).is_file() else []
        for test in (*recorded, *fault.tests):
            caught, note = tree.failed_test([test], fault.framework, temporary)
            notes += [note] if note else []
            if caught:
                return Outcome(fault, caught, time.monotonic() - began, "; ".join(notes))
    return Outcome(fault, None, time.monotonic() - began, "; ".join(notes))


def failing_anyway(outcomes: list[Outcome], tree: Tree, temporary: Path) -> list[str]:
    """Tests that caught a fault and fail on the tree as it is, too: they prove nothing."""
    found = []
    caught = {(o.fault.framework, o.test.partition("::")[0], o.test) for o in outcomes if o.test}
    files = itertools.groupby(sorted(caught), key=lambda entry: entry[:2])
    for (framework, _), entries in files:
        left = [test for _, _, test in entries]
        while left:
            failed, note = tree.failed_test(left, framework, temporary)
            if note:
                print(f"NOT VERIFIED  {', '.join(left)}: {note}")
            if not failed:
                break
            found.append(failed)
            left = [test for test in left if test != failed] if failed in left else []
    return found


def run(faults: list[Fault], known: dict[str, str], workers: int, source: Path) -> list[Outcome]:
    """Every fault, `workers` at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="planted-") as top:
        os.chmod(top, 0o755)  # tests of other users enter it
        temporary = Path(top) / "tmp"
        temporary.mkdir()
        trees: Queue[Tree] = Queue()
        for number in range(workers):
            trees.put(Tree(source, Path(top) / f"tree{number}"))

        def one(fault: Fault) -> Outcome:
            tree = trees.get()
            try:
                outcome = judge(fault, tree, known.get(fault.name), temporary)
            finally:
                trees.put(tree)
            print(line_of(outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            outcomes = list(pool.map(one, faults))
        innocent = failing_anyway(outcomes, trees.get(), temporary)
    for test in innocent:
        print(f"FAILS WITHOUT A FAULT  {test}")
    return [
        Outcome(o.fault, None, o.seconds, "its test fails anyway") if o.test in innocent else o
        for o in outcomes
    ]


def line_of(outcome: Outcome) -> str:
    """For people."""
    state = outcome.test or "NOBODY CATCHES IT"
    note = f"  ({outcome.note})" if outcome.note else ""
    return f"{outcome.seconds:6.1f} s  {outcome.fault.name}: {state}{note}"


def follow(faults: list[Fault], tree: Path) -> None:
    """Have entries whose text stands in one other file of the library name that file."""
    text = LIST.read_text()
    sources = [path for folder in LIBRARY for path in sorted((tree / folder).rglob("*.*"))]
    texts = {path: path.read_text() for path in sources if path.suffix in SUFFIXES}
    for fault in faults:
        if fault.problem(tree) is None:
            continue
        found = [path for path, held in texts.items() if fault.old in held]
        if len(found) == 1 and texts[found[0]].count(fault.old) == 1:
            moved = found[0].relative_to(tree).as_posix()
            entry = f'name = "{fault.name}"\nfile = "'
            text = text.replace(f'{entry}{fault.file}"', f'{entry}{moved}"')
            print(f"{fault.name}: {fault.file} -> {moved}")
    LIST.write_text(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, dest="workers", help="faults at a time")
    parser.add_argument("--only", default="", help="faults whose name or file has this text")
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--follow", action="store_true", help="find texts that moved; no test")
    parser.add_argument("--record", action="store_true", help="write planted_faults.json")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="where to plant them")
    return parser.parse_args()


def main() -> int:
    """Exit code 0 where every fault is caught."""
    options = arguments()
    every = read_faults()
    faults = [fault for fault in every if options.only in fault.name + fault.file]
    if options.follow:
        follow(faults, options.tree)
        faults = [fault for fault in read_faults() if fault.name in {f.name for f in faults}]
    wrong = [(f.name, f.problem(options.tree)) for f in faults if f.problem(options.tree)]
    for name, problem in wrong:
        print(f"DOES NOT FIT  {name}: {problem}")
    if wrong or options.check or options.follow:
        print(f"{len(faults) - len(wrong)} of {len(faults)} faults fit")
        return 1 if wrong else 0
    known = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
    outcomes = run(faults, known, options.workers, options.tree.resolve())
    missed = [outcome.fault for outcome in outcomes if outcome.test is None]
    if options.record:
        names = {fault.name for fault in every}
        caught = {o.fault.name: o.test for o in outcomes if o.test}
        kept = {name: test for name, test in (known | caught).items() if name in names}
        CAUGHT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults are caught")
    for fault in missed:
        print(f"  {fault.name}: {fault.breaks} ({fault.file})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
