"""Processes that start their measured part at the same moment: each says "ready", and begins when
all are. Imported by the benchmarks beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

REPOSITORY = Path(__file__).resolve().parents[1]


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, and this repository and its benchmarks first on the module path."""
    own = str(REPOSITORY), str(REPOSITORY / "benchmarks")
    path = os.pathsep.join([*own, environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": path}


def start_together(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> tuple[float, list[dict[str, Any]]]:
    """The common start, on the clock `time.monotonic`, which all processes of a machine share; and
    the JSON object in the last line of each command's output, in their order.

    A command prints a line "ready" and waits for a line on standard input.

    Raises:
        click.ClickException: one ended before it was ready, or with another exit code than 0.
    """
    children: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            children.append(subprocess.Popen(command, text=True, env=dict(environment), **pipes))
        for process in children:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise click.ClickException("a measuring process ended before it was ready")
        started = time.monotonic()
        for process in children:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in children]
        if any(process.returncode for process in children):
            raise click.ClickException("a measuring process failed")
    finally:
        for process in children:
            if process.poll() is None:  # it waits for a start that will not come
                process.kill()
                process.wait()
    return started, [json.loads(output.splitlines()[-1]) for output in outputs]
