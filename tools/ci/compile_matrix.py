#!/usr/bin/env python3
"""Compile the kernels of the BF16 engine for Blackwell, or of another engine for every architecture
that it serves, and print seconds, registers and spills. No GPU is needed.

    tools/ci/compile_matrix.py                             # a row per product and target
    tools/ci/compile_matrix.py --every                     # every activation, bias, tiling and dtype
    tools/ci/compile_matrix.py --arch sm_100a --arch sm_103a
    tools/ci/compile_matrix.py --engine mxfp8 [--every]    # those of engine `mxfp8`
    tools/ci/compile_matrix.py --engine triton             # those of engine `triton`
    tools/ci/compile_matrix.py --cuda --arch sm_80         # the CUDA C++ that any engine needs
    tools/ci/compile_matrix.py --sizes --arch sm_100a      # bytes of the compile cache of one model
    tools/ci/compile_matrix.py --sizes --engine triton

Exit code 1 when a kernel was refused, spills more than tests/kernels/ptxas_report.py or
triton_report.py allows, or does not load every operand (ptx_report.py). Seconds are those of one
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernels import ptx_report  # noqa: E402
from kernels.gemm_matrix import TARGETS, every_variant, shape_for  # noqa: E402
from kernels.mx_matrix import ARCHS as MX_ARCHS  # noqa: E402
from kernels.mx_matrix import every_mx_variant, mx_shape  # noqa: E402
from kernels.ptx_report import Traffic  # noqa: E402
from kernels.ptxas_report import (  # noqa: E402
    SpillError,
    parse_ptxas,
    require_no_spills,
    resource_usage,
)
from kernels.triton_report import compiled  # noqa: E402
from kernels.triton_report import problems as triton_problems  # noqa: E402

from sonicmoe.architectures import ARCHITECTURES  # noqa: E402
from sonicmoe.engine.capabilities import TRITON  # noqa: E402
from sonicmoe.engine.cold_start import run_jobs  # noqa: E402
from sonicmoe.engine.compile_plan import warm_up_plan  # noqa: E402
from sonicmoe.engine.settings import EngineSettings, Workload  # noqa: E402
from sonicmoe.enums import ActivationType  # noqa: E402
from sonicmoe.jit.cache import CompileCache  # noqa: E402
from sonicmoe.jit.plan import ModelSpec  # noqa: E402
from sonicmoe.jit.toolchain import find_toolkit  # noqa: E402
from sonicmoe.jit.warmup import warm_up  # noqa: E402
from sonicmoe.kernels import EVERY_RUN  # noqa: E402
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel  # noqa: E402
from sonicmoe.kernels.blackwell.mx_gemm import all_kernels as mx_kernels  # noqa: E402
from sonicmoe.kernels.blackwell.quack_gemm import all_kernels  # noqa: E402
from sonicmoe.kernels.cuda_wgrad import expert_rows_source  # noqa: E402
from sonicmoe.kernels.triton.tilings import TILINGS  # noqa: E402
from sonicmoe.kernels.triton.variants import ExpertShape  # noqa: E402
from sonicmoe.kernels.triton.variants import all_variants as triton_variants  # noqa: E402

WORKER = ROOT / "tests" / "kernels" / "quack_variants.py"
CHOICES = ("activation", "bias", "store_z", "gather", "transpose", "stored", "halves", "dtype")
TRITON_CHOICES = ("store_z", "store_y1", "gradient", "step_m")
# Columns of the table of docs/lab/compiled_kernels.md: a target's architecture and class.
Cells = dict[str, dict[tuple[str, str], str]]


def variants(arch: str, family: str, every: bool) -> tuple[CuteKernel, ...]:
    """Those of one target: of one model, or all."""
    shape = shape_for(arch, family)
    return every_variant(shape) if every else all_kernels(shape, recompute_z=True)


def mx_variants(arch: str, every: bool) -> tuple[CuteKernel, ...]:
    """The same of engine `mxfp8`."""
    return every_mx_variant(arch) if every else mx_kernels(mx_shape(arch))


def answers(kernels: Sequence[CuteKernel]) -> Iterator[tuple[CuteKernel, list]]:
    """What a process that compiles them says of each, as it comes."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("needs nvcc")
    requests = "".join(
        json.dumps([number, kernel.arch, kernel.entry, dict(kernel.statics)]) + "\n"
        for number, kernel in enumerate(kernels)
    )
    with tempfile.TemporaryFile("w+") as lines:
        lines.write(requests)
        lines.seek(0)
        command = [sys.executable, str(WORKER), str(toolkit.home / "bin" / "ptxas")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        with subprocess.Popen(
            command, stdin=lines, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                number, *found = json.loads(line)
                yield kernels[number], found
        if process.returncode != 0:
            raise SystemExit(f"{WORKER.name} ended with {process.returncode}")


def label(kernel: CuteKernel) -> str:
    """The choices of a variant, and its tiling."""
    statics = dict(kernel.statics)
    chosen = [f"{name}={statics[name]}" for name in CHOICES if name in statics]
    rows, columns = statics["tile"]
    along_m, along_n = statics["cluster"]
    words = [f"{rows}x{columns}", f"cl({along_m},{along_n})"]
    words += [name for name in ("pingpong", "clc") if statics.get(name)]
    return f"{' '.join(words)} | {' '.join(chosen)}"


def product(kernel: CuteKernel) -> str:
    """`up` without z, or `wgrad`, stored as halves: what of a model's kernels this one is."""
    statics, name = dict(kernel.statics), kernel.name.removeprefix("bf16_")
    if statics.get("halves"):
        return f"{name}, stored: halves"
    if name == "wgrad":
        return f"{name}, stored: {statics['stored']}"
    return f"{name} without z" if statics.get("store_z") is False else name


def table(cells: Cells) -> list[str]:
    """A row per kernel, a column per target: seconds, registers, bytes of spills."""
    targets = list(dict.fromkeys(target for row in cells.values() for target in row))
    names = (
        arch if ARCHITECTURES[arch].family == family else f"{family} on {arch}"
        for arch, family in targets
    )
    rows = [["seconds, registers, spilled bytes", *names], ["---"] * (len(targets) + 1)]
    rows += [[name, *(row.get(target, "–") for target in targets)] for name, row in cells.items()]
    return [f"| {' | '.join(row)} |".replace(" --- ", "---") for row in rows]


def gemm_rows(kernels: Sequence[CuteKernel], cells: Cells) -> Iterator[tuple[str, str | None]]:
    """A row of the table for each kernel, and what is wrong with it; fills `cells`."""
    for kernel, found in answers(kernels):
        statics = dict(kernel.statics)
        family = statics.get("family", ARCHITECTURES[kernel.arch].family)
        head = f"| {kernel.arch} | {family} | {kernel.name} | {label(kernel)} |"
        if len(found) == 1:
            yield f"{head} refused | | |", f"{kernel.name} for {kernel.arch}: {found[0]}"
            continue
        seconds, report, moved = found
        (item,) = parse_ptxas(report)
        spilled = f"{item.spill_store_bytes} + {item.spill_load_bytes}"
        wrong = ptx_report.problems(kernel.name, statics, Traffic(**moved))
        wrong += spills([item])
        row = f"{head} {seconds:.1f} | {item.registers} | {spilled} |"
        cell = f"{seconds:.1f}, {item.registers}, {item.spill_store_bytes + item.spill_load_bytes}"
        cells.setdefault(product(kernel), {})[kernel.arch, family] = cell
        yield row, f"{kernel.name} for {kernel.arch}: {'; '.join(wrong)}" if wrong else None


def spills(items: Iterable) -> list[str]:
    """What the gate would say."""
    try:
        require_no_spills(items)
    except SpillError as error:
        return [str(error)]
    return []


def cuda_rows(archs: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """The same for the sources of CUDA C++ that engines of every family load, a row per source."""
    with tempfile.TemporaryDirectory() as folder:
        cache = CompileCache(Path(folder) / "cache", Path(folder) / "local")
        for arch in archs:
            for source in (*(make(arch) for make in EVERY_RUN), expert_rows_source(arch)):
                began = time.monotonic()
                items = resource_usage(source.compile(cache))
                seconds = time.monotonic() - began
                most = max(item.registers for item in items)
                spilled = sum(item.spill_store_bytes + item.spill_load_bytes for item in items)
                row = f"| {arch} | | {source.name} | {len(items)} kernels | | {seconds:.1f} | {most} | {spilled} |"
                wrong = spills(items)
                yield row, "; ".join(wrong) or None


def triton_rows(archs: Iterable[str], cells: Cells) -> Iterator[tuple[str, str | None]]:
    """The same for the kernels of one SwiGLU model on engine `triton`."""
    for arch in archs:
        shape = ExpertShape(3072, 1536, ActivationType.SWIGLU, arch=arch)
        for job in triton_variants(shape, recompute_z=True):
            chosen = {name: value for name, value in job.statics if name in TRITON_CHOICES}
            words = ", ".join(f"{name}={value}" for name, value in chosen.items())
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                found = compiled(job, CompileCache(Path(folder) / "cache", Path(folder) / "local"))
                seconds = time.monotonic() - began
            name = f"{job.name.removeprefix('triton_')} {words}".strip()
            cell = f"{seconds:.1f}, {found.registers}, {found.spilled}"
            cells.setdefault(name, {})[arch, ARCHITECTURES[arch].family] = cell
            wrong = "; ".join(triton_problems(job, found))
            head = f"| {arch} | triton | {job.name} | | {words} | {seconds:.1f} |"
            row = f"{head} {found.registers} | {found.spilled} |"
            yield row, f"{job.name} for {arch}: {wrong}" if wrong else None


def size_rows(engine: str, archs: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """What a warm-up of one model leaves in the cache."""
    for arch in archs:
        with tempfile.TemporaryDirectory() as folder:
            cache = CompileCache(Path(folder) / "cache", Path(folder) / "local")
            spec = ModelSpec(8, 3072, 1536, arch=arch)
            on_triton = run_jobs(TRITON, Workload(EngineSettings(), 3072, 1536), arch)
            planned = on_triton if engine == "triton" else warm_up_plan(spec, "bf16")
            report = warm_up(spec, cache, compile_jobs=planned)
            files = [path for path in Path(folder, "cache").rglob("*") if path.is_file()]
            total = sum(path.stat().st_size for path in files) / 2**20
            row = f"| {arch} | {len(report.kernels)} kernels | {total:.1f} MiB | {report.seconds:.0f} s |"
            failed = [outcome.message for outcome in report.kernels if outcome.message]
            yield row, "; ".join(map(str, failed)) or None


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=list(ARCHITECTURES))
    parser.add_argument("--engine", choices=("bf16", "mxfp8", "triton"), default="bf16")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    given = parser.parse_args()
    targets = [target for target in TARGETS if given.arch is None or target[0] in given.arch]
    cells: Cells = {}
    archs = given.arch or list(dict.fromkeys(arch for arch, _ in targets))
    if given.engine == "triton":
        archs = given.arch or list(TILINGS)
    if given.cuda:
        rows = cuda_rows(archs)
    elif given.sizes:
        rows = size_rows(given.engine, archs)
    else:
        if given.engine == "triton":
            kernels = []
        elif given.engine == "mxfp8":
            archs = [arch for arch in MX_ARCHS if given.arch is None or arch in given.arch]
            kernels = [kernel for arch in archs for kernel in mx_variants(arch, given.every)]
        else:
            kernels = [kernel for target in targets for kernel in variants(*target, given.every)]
        rows = (
            triton_rows(archs, cells)
            if given.engine == "triton"
            else gemm_rows(tuple(dict.fromkeys(kernels)), cells)
        )
        print("| target | class | kernel | tiling | choices | seconds | registers | spills |")
        print("|---|---|---|---|---|---|---|---|")
    wrong = []
    for row, problem in rows:
        print(row, flush=True)
        wrong += [problem] if problem else []
    if cells and not given.every:
        print("", *table(cells), sep="\n")
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
