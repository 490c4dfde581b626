"""`sonicmoe doctor`: one screen, or one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..architectures import describe
from ..diagnostics.doctor import (
    COMPILE_COMMAND,
    ERROR,
    PRECISIONS,
    CacheState,
    Progress,
    Report,
    load_framework,
    look_around,
)
from ..diagnostics.json_data import plain
from .options import framework_option
from .refusals import OneLineCommand
from .screen import Activity, WordConsole

# Who runs the doctor suspects that something hangs, and silence would look like a hang too.
PATIENCE_S = 1.0


@click.command(cls=OneLineCommand)
@framework_option("The framework to examine.")
@click.option("--self-test", is_flag=True, help="Compile the self-test's kernels where they are missing, "
              "a minute or more on a new machine, and say so on stderr.")  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen."
)
@click.pass_context
def doctor(ctx: click.Context, framework: str, self_test: bool, as_json: bool) -> None:
    """Check this machine: versions, GPU, engine, caches, flags, self-test. Exit code 1 when a check
    fails.

    Its engine line says what would run here as the flags are, for bfloat16 tokens, SwiGLU without
    biases, and sizes that every engine takes; the lines below it say which engines can.

    Compiles nothing without --self-test: where kernels are missing, their number and the command
    that compiles them stand in place of the self-test.
    """
    with Activity("doctor", patience_s=PATIENCE_S) as doing:
        # Whoever asks for compiles is told about each of them, and others only if it takes long.
        progress = doing.say if self_test else doing.begin
        report = examine(framework, self_test=self_test, progress=progress)
    if as_json:
        click.echo(json.dumps(to_json(report), indent=2, allow_nan=False))
    else:
        show(report, WordConsole())
    ctx.exit(0 if report.healthy else 1)


def examine(
    framework: str = "auto", *, self_test: bool = False, progress: Progress = lambda line: None
) -> Report:
    """Look at this process's environment, load a framework ("torch", "paddle" or "auto", see
    `frameworks.choose`), and look at the engine that a run would get. Never raises for what it finds.

    Args:
        self_test: compile the kernels that the self-test lacks; otherwise it runs where none is missing.
        progress: gets a line before everything that may take long.
    """
    # Without a framework, so a broken installation still gets a report of its flags and caches.
    report, config = look_around()
    if load_framework(report, framework, progress):
        # This import binds the package to the framework that was loaded.
        from ..diagnostics.doctor_engine import examine_engine

        with config.activate():
            examine_engine(report, config, self_test, progress)
    return report


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data; a number that is not finite becomes null."""
    # `healthy` is a property, which `asdict` does not see.
    return {"healthy": report.healthy, **plain(dataclasses.asdict(report))}


def show(report: Report, console: Console) -> None:
    """Print the screen: the verdict, what is wrong, then what was found."""
    # A grid folds long paths inside their own column, so that the headings stay readable.
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in fact_lines(report):
        facts.add_row(name, text)
    title = f"sonicmoe {report.versions.get('sonicmoe')} from {report.package_path}"
    console.print(title, style="bold")
    console.print(verdict(report), style="bold green" if report.healthy else "bold red")
    for problem in report.problems:
        style = "red" if problem.severity == ERROR else "yellow"
        console.print(f"{problem.severity}: {problem.what}", style=style)
        console.print(f"  -> {problem.remedy}")
    console.print(facts)
    if report.self_test:
        console.print(self_test_table(report))


def fact_lines(report: Report) -> list[tuple[str, str]]:
    """`(heading, text)` of everything that is one line."""
    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items() if found)
    # A missing package explains more faults than one that is there, so it has a line of its own.
    absent = ", ".join(name for name, found in report.versions.items() if not found)
    framework = f"{report.framework} ({report.framework_reason})" if report.framework else "none"
    return [
        ("versions", versions),
        ("not installed", absent or "-"),
        ("framework", framework),
        ("device", device_line(report)),
        ("engine", f"{report.engine}: {report.engine_reason}" if report.engine else "none"),
        *engine_lines(report),
        *((state.role.replace("_", " "), cache_line(state)) for state in report.caches),
        *(("warmed", line) for state in report.caches for line in state.warmed),
        *(("carried", line) for line in report.carried),
        *kernel_lines(report),
        *((name, value) for name, value in report.honoured.items() if value),
        *((flag["name"], flag["value"]) for flag in report.flags if flag["source"] != "default"),
        ("other flags", "at their defaults (docs/env.md; --json lists them)"),
    ]


def engine_lines(report: Report) -> list[tuple[str, str]]:
    """Which engines this machine can run, and why not the others; those of one reason on one line."""
    groups: dict[str, list[str]] = {}
    for name, able in report.engines.items():
        # The engines' record (docs/engines.md) has the list of architectures.
        groups.setdefault(able.partition(", and its kernels are for")[0], []).append(name)
    return [("engines", f"{', '.join(names)}: {reason}") for reason, names in groups.items()]


def device_line(report: Report) -> str:
    """GPU name, architecture and compute capability, or the reason why there is none."""
    if report.device is None:
        return "unknown: no framework"
    name, gpu, capability = report.device.values()
    if gpu is None:
        return f"{name} (no GPU visible to {report.framework})"
    # The number alone ("9.0") tells nobody which kernels such a GPU runs.
    major, minor = map(int, str(capability).split("."))
    return f"{name}: {gpu}, {describe((major, minor))}"


def kernel_lines(report: Report) -> list[tuple[str, str]]:
    """How many kernels of the self-test are compiled, where it needs any."""
    if not report.kernels or not report.kernels["needed"]:
        return []
    needed, missing = report.kernels["needed"], report.kernels["missing"]
    rest = f"; `{COMPILE_COMMAND}` compiles the others" if missing else ""
    line = f"{needed - len(missing)} of {needed} of the self-test are compiled{rest}"
    return [("kernels", line)]


def cache_line(state: CacheState) -> str:
    """Path and state of one cache directory."""
    exists = "there" if state.exists else "not created yet"
    return f"{state.path} ({exists}, {state.problem or 'takes kernels'})"


def self_test_table(report: Report) -> Table:
    """One row per tensor; cosine, relative RMSE and verdict per precision."""
    headings = [text for name in PRECISIONS for text in (f"{name} cosine", "rel. RMSE", "")]
    title = f"self-test {report.self_test_seconds or 0:.1f} s"
    table = Table(title, *headings, box=None, padding=(0, 2, 0, 0))
    # A dictionary keeps the order of the checks; a set would not.
    for tensor in dict.fromkeys(check["tensor"] for check in report.self_test):
        cells = []
        for check in (check for check in report.self_test if check["tensor"] == tensor):
            passed = "pass" if check["passed"] else "FAIL"
            cells += [f"{check['cosine']:.6f}", f"{check['relative_rmse']:.2%}", passed]
        table.add_row(tensor, *cells)
    return table


def verdict(report: Report) -> str:
    """Healthy or not, and how many findings there are of each kind."""
    errors = sum(problem.severity == ERROR for problem in report.problems)
    warnings = len(report.problems) - errors
    counts = f"{errors} failed checks, {warnings} warnings"
    word = "healthy" if report.healthy else "not healthy"
    return f"{word}: {counts}" if report.problems else word
