"""Commands with as little work as there is, in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "numerics": "--recipe 1x128 --scales fp32 --z bf16 --data gaussian --tokens 8 --hidden 128 "
    "--intermediate 128 --experts 2 --topk 1",
    "train": f"--data {__file__} --steps 2 --layers 2 --hidden 16 --heads 2 --experts 2 --topk 1 "
    "--intermediate 16 --seq-len 8 --batch 2 --precision fp32",
    "bench": "--engine reference --T 16 --H 16 --I 16 --E 2 --K 1 --rounds 1 --warmup 1 --layers 1",
    "doctor": "",
}


def run_small(
    command: str, *arguments: str, cwd: Path, before: str = "", **environ: str
) -> tuple[str, str]:
    """stdout and stderr of `sonicmoe command`, in the directory `cwd`, with caches of its own;
    `before`: Python source that runs first.
    """
    cwd.mkdir(exist_ok=True)
    words = [command, *SMALL[command].split(), *arguments]
    program = f"{before}\nfrom sonicmoe.cli.main import main; main({words!r})"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environ}
    variables |= {"SONIC_MOE_CACHE_DIR": str(cwd), "SONIC_MOE_LOCAL_CACHE_DIR": str(cwd)}
    done = processes.run(["-c", program], variables, cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
