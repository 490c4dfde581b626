"""Runs scripts one after the other in one process, each as if it were alone there: importing
transformers takes longer than most of them take to run.

python in_turn.py COMMAND_LINE ...      (a form feed ends what each prints)
"""

from __future__ import annotations

import runpy
import shlex
import sys

for line in sys.argv[1:]:
    sys.argv = shlex.split(line)
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(end="\f", flush=True)
