#!/usr/bin/env python3
"""Compare the bits of every output and gradient with recorded ones, under PyTorch and Paddle.

    tools/ci/recorded_bits.py                                # this host, each framework that is here
    tools/ci/recorded_bits.py --framework paddle --portable  # the cases that any processor can check
    tools/ci/recorded_bits.py --record                       # write the record anew: say why
    tools/ci/recorded_bits.py --device cuda --tree OLD --out old.json
    tools/ci/recorded_bits.py --device cuda --against old.json

recorded_bits.json holds two kinds of digests. Those of portable cases hold on any processor,
because all of their sums are exact. Those of all cases hold under one framework's version on one
kind of processor, because libraries add in another order elsewhere; where there is none for this
machine, the command says so. A case is known by its line in tests/oracle, so the record keeps its
cases where others draw other ones. Exit code 1 where a digest differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Before numpy and the frameworks are imported, which read it then: the order of a sum depends on
# the number of threads.
for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[pool] = "1"

HERE = Path(__file__).resolve().parent
RECORD = HERE / "recorded_bits.json"
FRAMEWORKS = ("torch", "paddle")
Digests = dict[str, dict[str, str]]  # of tensors, by case


def bind(framework: str) -> None:
    """Bind this process's `sonicmoe` to a framework."""
    os.environ["SONICMOE_TEST_FRAMEWORK"] = framework
    if framework == "torch":
        import torch

        torch.set_num_threads(1)


def this_machine(framework: str) -> str:
    """The framework's version and the processor, as far as sums depend on them."""
    from importlib.metadata import version

    if framework == "paddle":
        known = f"paddle {version('paddlepaddle')}"
    else:
        import torch

        known = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {name.strip(): value.strip() for name, value in fields.items()}
    processor = [found.get(name, "?") for name in ("vendor_id", "cpu family", "model")]
    return f"{known}, {' '.join(processor)}"


def compute(
    device: str, portable: bool, recorded: Iterable[str] | None = None
) -> tuple[Digests, Digests]:
    """`(portable digests, all digests)` of recorded cases, or of those that this process draws;
    `portable`: of those alone.
    """
    sys.path.insert(0, str(HERE))
    from bits_cases import cpu_cases, digest, gpu_cases, named, results
    from bits_cases import portable as holds_anywhere

    drawn = cpu_cases() if device == "cpu" else gpu_cases()
    anywhere: Digests = {}
    here: Digests = {}
    for name, case, engine in drawn if recorded is None else named(recorded):
        if portable and not holds_anywhere(case):
            continue
        try:
            arrays = results(case, engine)
        except Exception as error:
            if device == "cpu":
                raise
            # A GPU that cannot run one case still runs the others, and a refusal is compared, too.
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            here[name] = {"raised": type(error).__name__}
            continue
        here[name] = {part: digest(array, signs=True) for part, array in arrays.items()}
        if holds_anywhere(case):
            anywhere[name] = {part: digest(array, signs=False) for part, array in arrays.items()}
    return anywhere, here


def differences(found: Digests, wanted: Mapping[str, Mapping[str, str]], what: str) -> list[str]:
    """A line per case that differs from what is recorded, or that only one side has."""
    lines = [f"{what}: no longer computed: {name}" for name in wanted if name not in found]
    for name, digests in found.items():
        recorded = wanted.get(name)
        if recorded is None:
            lines.append(f"{what}: not recorded: {name}")
        elif digests != recorded:
            names = digests.keys() | recorded.keys()
            other = sorted(key for key in names if digests.get(key) != recorded.get(key))
            lines.append(f"{what}: other bits in {', '.join(other)}: {name}")
    return lines


def is_of_torch(case: str) -> bool:
    """Whether the case calls a face that PyTorch alone has."""
    return any(f"face={face}" in case for face in ("stacked", "triples", "moe", "transformers"))


def packed(digests: Digests) -> dict[str, str]:
    """A line of the file per case."""
    return {
        name: " ".join(f"{tensor}:{value}" for tensor, value in found.items())
        for name, found in digests.items()
    }


def unpacked(lines: Mapping[str, str]) -> Digests:
    """The inverse of `packed`."""
    return {name: dict(part.split(":") for part in line.split()) for name, line in lines.items()}


def read(path: Path) -> dict[str, Any]:
    """The record: "portable", the same for both frameworks, and "processors" by machine."""
    if not path.exists():
        return {"portable": {}, "processors": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check(framework: str, portable: bool, recording: bool) -> int:
    """Compute, and compare with the record, or write it."""
    record, machine = read(RECORD), this_machine(framework)
    if recording:
        anywhere, here = compute("cpu", portable)
        # Both frameworks give the same bits there, so the record of one judges the other.
        if framework == "torch":
            record["portable"] = packed(anywhere)
        record["processors"][machine] = packed(here)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{framework}: recorded {len(here)} cases, {len(anywhere)} of them portable")
        return 0
    known, recorded = record["processors"].get(machine), unpacked(record["portable"])
    if framework == "paddle":
        recorded = {name: found for name, found in recorded.items() if not is_of_torch(name)}
    wanted = {} if known is None or portable else unpacked(known)
    anywhere, here = compute("cpu", portable, recorded | wanted)
    lines = differences({name: anywhere[name] for name in recorded}, recorded, "portable")
    if wanted:
        lines += differences({name: here[name] for name in wanted}, wanted, machine)
    elif not portable:
        print(f"NOT COMPARED under {framework}: what nobody recorded on {machine}")
    print("\n".join(lines) if lines else f"{framework}: {len(here)} cases have the recorded bits")
    return 1 if lines else 0


def check_files(options: argparse.Namespace) -> int:
    """Compute, and compare with a file of another tree, or write one."""
    wanted = unpacked(json.loads(options.against.read_text())) if options.against else None
    _, here = compute(options.device, options.portable, wanted)
    if options.out is not None:
        options.out.write_text(json.dumps(packed(here), indent=1) + "\n")
        print(f"wrote the digests of {len(here)} cases to {options.out}")
    if wanted is None:
        if options.out is None:
            print(json.dumps(packed(here), indent=1))
        return 0
    lines = differences(here, wanted, "against")
    print("\n".join(lines) if lines else f"{len(here)} cases have the bits of {options.against}")
    return 1 if lines else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, help="default: each that is installed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--portable", action="store_true", help="portable cases alone")
    parser.add_argument("--record", action="store_true", help="write recorded_bits.json")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="whose sonicmoe")
    parser.add_argument("--out", type=Path, help="write all digests to this file")
    parser.add_argument("--against", type=Path, help="compare with such a file, not the record")
    return parser.parse_args()


def main() -> int:
    """Exit code 0 where nothing differs."""
    options = arguments()
    tree = str(options.tree.resolve())
    sys.path.insert(0, tree)
    # Processes that compile kernels import the same tree.
    os.environ["PYTHONPATH"] = tree
    files = options.device == "cuda" or options.out or options.against
    if options.framework is None and not files:
        here = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]
        command = [sys.executable, __file__, *sys.argv[1:], "--framework"]
        return max(subprocess.run([*command, name], check=False).returncode for name in here)
    bind(options.framework or "torch")
    if files:
        return check_files(options)
    return check(options.framework, options.portable, options.record)


if __name__ == "__main__":
    sys.exit(main())
