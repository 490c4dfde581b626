#!/usr/bin/env python3
"""Run the tests marked `trained` as other processors would: under each setting that narrows what
the CPU libraries may use.

    tools/ci/other_processors.py                          # every setting, every trained test
    tools/ci/other_processors.py --setting MKL_CBWR=AVX2 tests/node

The bits of a product depend on the processor and on the library, and training adds up what they
differ by. So a bound on trained values holds where it was written, and must hold elsewhere too.
Arguments after the options go to pytest. Exit code 1 when a test fails under any setting.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The first four are older processors. The two behind them use no AVX at all, which is farther away
# than any processor of today.
SETTINGS = (
    "as it is",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_CBWR=AVX2",
    "OPENBLAS_CORETYPE=Haswell",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ATEN_CPU_CAPABILITY=default",
)
THROUGH_PADDLE = ("tests/node", "tests/paddle")


def runs(setting: str, tests: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """`(pytest arguments, variables)` of each run: under PyTorch, and the suites below the PyTorch
    face through Paddle too.
    """
    variables = dict([setting.split("=")]) if "=" in setting else {}
    found = [(["-m", "trained", *tests], variables)]
    if not tests and importlib.util.find_spec("paddle"):
        paddle = {**variables, "SONICMOE_TEST_FRAMEWORK": "paddle"}
        found.append((["-m", "trained", *THROUGH_PADDLE], paddle))
    return found


def main() -> int:
    """A line per setting; the output of pytest where something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this one")
    options, tests = parser.parse_known_args()
    failed = False
    for setting in options.setting or SETTINGS:
        for arguments, variables in runs(setting, tests):
            command = [sys.executable, "-m", "pytest", *arguments]
            result = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **variables}, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
            framework = variables.get("SONICMOE_TEST_FRAMEWORK", "torch")
            counts = re.findall(r"^\d+ (?:passed|failed).*", result.stdout, flags=re.MULTILINE)
            print(
                f"{setting:<28} {framework:<7} {counts[-1] if counts else 'no result'}", flush=True
            )
            if result.returncode:
                failed = True
                print(result.stdout + result.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
