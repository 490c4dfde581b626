"""`sonicmoe warmup`: compile the kernels of a training run before it starts, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..architectures import DEFAULT_ARCH, chosen_arch
from ..config import current_config
from ..engine.compile_plan import require_precision, warm_up_plan, without_kernels
from ..host import capabilities_of_host
from ..jit.cache import CompileCache, default_cache
from ..jit.cpus import AUTO, compilers
from ..jit.errors import PackError
from ..jit.manifest import Artefact
from ..jit.pack import read_pack, refusal, unpack, write_pack
from ..jit.parallel import BUILT, CACHED, FAILED, MISSING, KernelOutcome
from ..jit.plan import BOTH, DTYPES, PRECISIONS, ModelSpec, WarmUpPlan
from ..jit.warmup import WarmUpReport, check, warm_up
from .options import activation_options
from .refusals import FailureLine, Location, OneLineCommand, refuse_beside
from .screen import Activity, WordConsole

# Sizes are 32-bit numbers in the kernels.
MOST = 2**31 - 1
EXAMPLE = {"--E": "8", "--H": "3072", "--I": "1536"}


@click.command(cls=OneLineCommand)
@click.option("--E", "experts", type=click.IntRange(1, MOST), help="Local experts of a rank.")
@click.option("--H", "hidden", type=click.IntRange(1, MOST), help="Hidden size.")
@click.option("--I", "intermediate", type=click.IntRange(1, MOST), help="Expert intermediate size.")
@click.option("--precision", type=click.Choice(PRECISIONS), default=BOTH, show_default=True,
              help="Kernels of FP8, of BF16 (fp16) or of both. With both, one that has none for this model is "
              "left out, with the reason.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Dtype of the tokens.")  # fmt: skip
@activation_options
@click.option("--adapters", is_flag=True, help="Also those of experts with low-rank adapters (LoRA).")  # fmt: skip
@click.option("--arch", show_default=f"that of this host's GPUs, and {DEFAULT_ARCH} where it has none",
              help="GPU architecture to compile for; the GPU need not be here.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once; default: the CPUs that this process may use.")  # fmt: skip
@click.option("--cache-dir", type=Location(file_okay=False), help="Default: SONIC_MOE_CACHE_DIR.")
@click.option("--check", "check_only", is_flag=True, help="Compile nothing; exit code 1 if anything is missing.")  # fmt: skip
@click.option("--pack", "pack_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Then write the kernels into FILE, to ship to a cluster or into an image.")  # fmt: skip
@click.option("--unpack", "unpack_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Compile nothing: put the kernels of FILE into the cache, checked as a whole. Needs no other option.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def warmup(
    ctx: click.Context, experts: int | None, hidden: int | None, intermediate: int | None, precision: str,
    dtype: str, activation: str, parameters: tuple[tuple[str, float], ...], adapters: bool,
    arch: str | None, jobs: int | None, cache_dir: Path | None, check_only: bool,
    pack_file: Path | None, unpack_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile every kernel that training this expert MLP needs, whatever SONIC_MOE_FP8_MODE it runs
    under.

    Exit code 1 when one failed or is missing.
    """
    settings = current_config()
    cache = default_cache(settings.replace(cache_dir=cache_dir) if cache_dir else settings)
    # With --json, stdout holds the object alone.
    console = WordConsole(stderr=as_json)
    sizes = {"--E": experts, "--H": hidden, "--I": intermediate}
    if unpack_file is not None:
        refuse_beside("--unpack", ("unpack_file", "arch", "cache_dir", "as_json"))
        ctx.exit(_unpack(unpack_file, cache, arch, console, as_json))
    if missing := [name for name, size in sizes.items() if size is None]:
        example = f"for example: sonicmoe warmup {' '.join(map(' '.join, EXAMPLE.items()))}"
        raise click.UsageError(f"Missing options {', '.join(missing)}; {example}")
    arch = chosen_arch(arch, capabilities_of_host())
    shape = experts or 0, hidden or 0, intermediate or 0
    spec = ModelSpec(*shape, dtype, activation, arch, parameters, adapters)
    # A precision that was asked for alone and has no kernels is an error; as one of two it is left
    # out with its reason.
    planned = require_precision(warm_up_plan(spec, precision, settings), precision)
    if precision == BOTH and (problem := without_kernels(spec, planned, settings)):
        raise FailureLine(problem)
    report = check(spec, cache, planned) if check_only else _compile(spec, cache, planned, jobs)
    if as_json:
        click.echo(json.dumps(to_json(report), indent=2))
    else:
        show(report, console)
        if lacking := _missing(report):
            # The architecture is named, because another host has another default.
            words = f"the same command without --check, and with --arch {arch}, compiles them"
            console.print(f"{lacking} kernels are missing: {words}")
    # A pack that lacks a kernel would make its user compile, which he cannot, or would rather not.
    if pack_file is not None and report.complete:
        found = [cache.try_load(job.key()) for job in planned.jobs]
        held = [artefact for artefact in found if artefact is not None]
        _pack(pack_file, held, console, spec, planned.precision)
    ctx.exit(0 if report.complete else 1)


def _unpack(
    path: Path, cache: CompileCache, arch: str | None, console: Console, as_json: bool
) -> int:
    """Install a pack; returns the exit code."""
    # Checked as a whole, and for this installation, before the first kernel is published.
    pack = _told(path, lambda: read_pack(path))
    reason = refusal(pack, arch)
    if reason is not None:
        raise PackError(f"{path} is not for this installation: {reason}")
    _told(path, lambda: unpack(path, cache))
    count, archs = len(pack.artefacts), ", ".join(pack.architectures)
    console.print(f"{count} kernels for {archs} from {path} in {cache.root}")
    precision = pack.precision if pack.precision in PRECISIONS else BOTH
    # What the pack was made for may not be what the settings in force here need.
    planned = warm_up_plan(pack.model, precision)
    report = check(pack.model, cache, planned)
    if report.complete:  # nothing is left to compile, so this writes the record
        report = warm_up(pack.model, cache, compile_jobs=planned)
    if as_json:
        click.echo(json.dumps(to_json(report), indent=2))
    elif not report.complete:
        console.print(
            f"{_missing(report)} kernels that this model needs under the settings in force are not in "
            "the pack: pack them under these settings"
        )
    return 0 if report.complete else 1


def _pack(
    path: Path, artefacts: Iterable[Artefact], console: Console, spec: ModelSpec, precision: str
) -> None:
    pack = _told(path, lambda: write_pack(path, artefacts, spec, precision))
    size = path.stat().st_size / (1 << 20)
    console.print(f"{len(pack.artefacts)} kernels packed into {path}, {size:.1f} MiB")


def _missing(report: WarmUpReport) -> int:
    return sum(outcome.state == MISSING for outcome in report.kernels)


def _told(path: Path, act: Callable[[], Any]) -> Any:
    """Errors of the file in one line."""
    try:
        return act()
    except OSError as error:
        raise PackError(f"{path}: {error.strerror or error}") from error


def _compile(
    spec: ModelSpec, cache: CompileCache, planned: WarmUpPlan, jobs: int | None
) -> WarmUpReport:
    with Activity("warmup") as doing:
        workers = min(compilers(jobs or AUTO), max(len(planned.jobs), 1))
        noun = "process" if workers == 1 else "processes"
        doing.begin(f"compiling for {spec.arch} in {workers} {noun}", total=len(planned.jobs))

        def advance(outcome: KernelOutcome) -> None:
            doing.at(f"(last {outcome.kernel})")
            doing.advance()

        return warm_up(spec, cache, jobs=jobs, progress=advance, compile_jobs=planned)


def to_json(report: WarmUpReport) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "complete": report.complete,
        "model": asdict(report.spec),
        "precision": report.precision,
        "left_out": list(report.left_out),
        "cache_dir": str(report.cache_dir),
        "only_local": report.only_local,
        "carried": report.carried,
        "seconds": round(report.seconds, 3),
        "record": str(report.record) if report.record else None,
        "kernels": [asdict(outcome) for outcome in report.kernels],
    }


def show(report: WarmUpReport, console: Console) -> None:
    """Print one row per kernel, the failures in full, the parts left out, and the summary."""
    table = Table("kernel", "state", "seconds", "key")
    for outcome in report.kernels:
        # The key's text ends with its digest; the fields before it would not fit into a table.
        table.add_row(
            outcome.kernel, outcome.state, f"{outcome.seconds:.1f}", outcome.key.rpartition(" ")[2]
        )
    console.print(table)
    for outcome in report.kernels:
        if outcome.state == FAILED:
            console.print(outcome.message)
    for line in report.left_out:
        console.print(f"left out, {line}")
    ready = sum(outcome.state in {BUILT, CACHED} for outcome in report.kernels)
    record = f"; recorded in {report.record}" if report.record else ""
    where = f"in {report.cache_dir}"
    # A cluster is warm only if every node finds the kernels, so others are counted apart.
    if report.only_local:
        alone = f"in {report.local_dir} of this node, where no other node looks"
        where = (
            alone if report.only_local == ready else f"{where}, {report.only_local} of them {alone}"
        )
    if report.carried:
        inside = "inside the installed package"
        all_inside = report.carried == ready
        where = inside if all_inside else f"{where}, {report.carried} of them {inside}"
    summary = f"{report.precision}: {ready} of {len(report.kernels)} kernels {where}, {report.seconds:.1f} s{record}"
    console.print(summary)


if __name__ == "__main__":
    warmup(prog_name="python -m sonicmoe.cli.warmup")
