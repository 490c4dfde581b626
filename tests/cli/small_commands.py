"""Commands with as little work as there is, in a process of their own."""

import os
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "train": f"--data {__file__} --steps 2 --layers 2 --hidden 16 --heads 2 --experts 2 --topk 1 "
    "--intermediate 16 --seq-len 8 --batch 2 --precision fp32",
    "bench": "--engine reference --T 16 --H 16 --I 16 --E 2 --K 1",
    "doctor": "",
}


def run_small(*commands, cwd, before=""):
    """stdout and stderr of commands with these arguments, one after the other in one process, in
    the directory `cwd`, with caches of its own; `before`: Python source that runs first.
    """
    words = [[name, *SMALL[name].split(), *given] for name, *given in commands]
    program = (
        f"{before}\nfrom sonicmoe.cli.main import main\n"
        f"for words in {words!r}: main(words, standalone_mode=False)"
    )
    caches = dict.fromkeys(("SONIC_MOE_CACHE_DIR", "SONIC_MOE_LOCAL_CACHE_DIR"), str(cwd))
    path = os.pathsep.join((str(ROOT), str(processes.TESTS)))
    variables = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **caches}
    done = processes.run(["-c", program], variables, cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
