#!/usr/bin/env python3
"""`make wheel`: a wheel that carries compiled kernels, for machines without a compiler.

The kernels are those that a warm-up would compile (`engine/compile_plan.py`), over all settings that
a program may choose, so a new variant enters by itself. Needs nvcc and no GPU. Kernels that an
earlier run compiled are taken from `build/wheel/cache`.

    tools/build_wheel.py                                 # everything that PARTS lists
    tools/build_wheel.py --part fp8 --activation swiglu --jobs 1
    tools/build_wheel.py --kernel routing_metadata       # one kernel, as the tests do
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sonicmoe.config import current_config  # noqa: E402
from sonicmoe.engine.capabilities import RECORDS  # noqa: E402
from sonicmoe.engine.compile_plan import warm_up_plan  # noqa: E402
from sonicmoe.enums import (  # noqa: E402
    ACTIVATIONS,
    ActivationParameters,
    ActivationType,
    EngineName,
    ZCode,
)
from sonicmoe.jit.cache import CompileCache  # noqa: E402
from sonicmoe.jit.carried import INDEX, LOADER  # noqa: E402
from sonicmoe.jit.cuda_source import CudaSource  # noqa: E402
from sonicmoe.jit.manifest import Artefact  # noqa: E402
from sonicmoe.jit.pack import versions_here  # noqa: E402
from sonicmoe.jit.plan import BF16, FP8, CompileJob, ModelSpec  # noqa: E402
from sonicmoe.jit.warmup import warm_up  # noqa: E402

ARCH = "sm_90a"
MOST_BYTES = 100 << 20
# Every Linux that runs a framework has these. libtvm_ffi.so comes with apache-tvm-ffi, which has
# loaded it before it loads a kernel. The CUDA runtime is linked in, so that of the framework may be
# of another version.
MAY_NEED = {
    "libtvm_ffi.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6",
    "ld-linux-x86-64.so.2",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Kernels of one precision, for every activation. `inner`: an I of the models that they serve."""

    precision: str
    dtype: str = "bfloat16"
    inner: int = 1024


PARTS = {
    "fp8": Part(FP8),
    "bf16": Part(BF16),
    "bf16, I >= 8192": Part(BF16, inner=8192),
    "fp16": Part(BF16, "float16"),
    "fp16, I >= 8192": Part(BF16, "float16", 8192),
}


def kernels(part: Part, activation: ActivationType, own: ActivationParameters = ()) -> Jobs:
    """What a run may load, whatever it saves, recomputes and quantises its weight gradients in."""
    spec = ModelSpec(1, 1024, part.inner, part.dtype, activation.value, ARCH, own)
    found: dict[CompileJob, None] = {}
    for changes in settings(part):
        config = current_config().replace(engine=EngineName.AUTO, **changes)
        planned = warm_up_plan(spec, part.precision, config)
        if planned.precision == part.precision:
            found |= dict.fromkeys(planned.jobs)
    return found


Jobs = dict[CompileJob, None]


def settings(part: Part) -> Iterator[dict[str, object]]:
    """Of the configuration, what decides which kernels are compiled."""
    if part.precision != FP8:
        yield {}
        return
    hopper = RECORDS[EngineName.HOPPER]
    for recipe in filter(None, hopper.recipes):
        # INT8 alone is there for comparisons, and is compiled where somebody asks for it.
        for code in (code for code in hopper.z_codes if code is not ZCode.INT8):
            for quantised in (True, False):
                yield {"recipe": recipe, "save_z": code, "fp8_wgrad": quantised}


def plan(
    names: Sequence[str], activations: Sequence[ActivationType]
) -> tuple[Jobs, dict[str, list[str]], list[str]]:
    """The compile jobs of these parts and activations, the activations of each part, and what is
    left out.
    """
    jobs: Jobs = {}
    contents: dict[str, list[str]] = {}
    for name in names:
        for activation in activations:
            found = kernels(PARTS[name], activation)
            if found:
                jobs |= found
                contents.setdefault(name, []).append(activation.value)
    left_out = ["adapters (LoRA)", *(name for name in PARTS if name not in names)]
    left_out += [kind.value for kind in ActivationType if kind not in activations]
    # Numbers that a layer sets may be compiled in.
    for name in names:
        for activation in activations:
            numbers = ACTIVATIONS[activation].parameters
            own = tuple((each.name, min(each.default, 8.0) / 2) for each in numbers)
            if own and not kernels(PARTS[name], activation, own).keys() <= jobs.keys():
                left_out.append(f"{name}: {activation.value} with parameters of a layer's own")
    return jobs, contents, left_out


def compiled(jobs: Jobs, cache: CompileCache, workers: int | None) -> list[Artefact]:
    """The artefacts; ends the process where a kernel did not compile."""
    lean = [replace(job, lineinfo=False) if isinstance(job, CudaSource) else job for job in jobs]
    total = len(lean)
    done = iter(range(1, total + 1))

    def tell(outcome: object) -> None:
        print(f"{next(done)} of {total}: {outcome.kernel} {outcome.state}", flush=True)  # type: ignore[attr-defined]

    spec = ModelSpec(1, 1024, 1024, arch=ARCH)
    report = warm_up(spec, cache, compile_jobs=lean, jobs=workers, progress=tell)
    if not report.complete:
        sys.exit("\n".join(outcome.message for outcome in report.kernels if outcome.message))
    found = [cache.try_load(job.key()) for job in lean]
    return [artefact for artefact in found if artefact is not None]


def dynamic(library: Path) -> tuple[set[str], tuple[int, int]]:
    """The libraries that one needs, and the newest version of glibc whose symbols it takes."""
    text = subprocess.run(
        ["readelf", "-d", "-V", "-W", str(library)], capture_output=True, text=True, check=True
    ).stdout
    versions = {(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)}
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)), max(versions, default=(2, 17))


def carry(artefacts: list[Artefact], folder: Path) -> tuple[list[dict[str, object]], str]:
    """Copy libraries into the package; returns their list, and the platform tag that they need."""
    listed, glibc = [], (2, 17)
    for artefact in artefacts:
        key = artefact.key
        target = folder / key.kernel / key.family
        target.mkdir(parents=True)
        library = target / f"{key.kernel}.so"
        subprocess.run(
            ["strip", "--strip-unneeded", "-o", str(library), str(artefact.file(library.name))],
            check=True,
        )
        needed, version = dynamic(library)
        if needed - MAY_NEED:
            sys.exit(f"{key}: it needs {sorted(needed - MAY_NEED)}, which a user may not have")
        glibc = max(glibc, version)
        content = library.read_bytes()
        facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        listed.append({"key": key.record(), "files": {library.name: facts}})
    return listed, f"manylinux_{glibc[0]}_{glibc[1]}_{os.uname().machine}"


def stage(tree: Path) -> None:
    """A copy of the package whose metadata asks for the loader that its kernels are built for."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("sonicmoe", "ernie_compat"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    loader = f"{LOADER}=={versions_here()[LOADER]}"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changed = project.replace("\ndependencies = [", f'\ndependencies = ["{loader}", ', 1)
    assert changed != project
    (tree / "pyproject.toml").write_text(changed, encoding="utf-8")


def built(tree: Path, platform: str, out: Path) -> Path:
    """The wheel of a staged tree; ends the process with the words of setuptools where it failed."""
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(out)]
    tags = ["--python-tag", "py3", "--plat-name", platform]
    done = subprocess.run([*command, *tags], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (wheel,) = out.glob(f"sonicmoe-*{platform}.whl")
    return wheel


def for_the_hub(tree: Path, versions: dict[str, str], digest: str, out: Path) -> None:
    """The package once more, as a folder that Hugging Face's `kernels` loads: a variant for this
    apache-tvm-ffi and CUDA, whatever the version of PyTorch.
    """
    loader, cuda = ("".join(versions[name].split(".")[:2]) for name in (LOADER, "nvcc"))
    variant = out / "kernels" / "build" / f"tvm-ffi{loader}-cu{cuda}-{os.uname().machine}-linux"
    shutil.rmtree(out / "kernels", ignore_errors=True)
    shutil.copytree(tree / "sonicmoe", variant, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = {
        "id": f"_sonicmoe_{digest[:12]}",
        "name": "sonicmoe",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": {"type": "cuda", "archs": [f"{ARCH[3]}.{ARCH[4:]}"]},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def main() -> None:
    """Compile, stage, build; the last line printed is the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    kinds = [kind.value for kind in ActivationType]
    parser.add_argument("--activation", action="append", choices=kinds, help="default: all")
    parser.add_argument("--kernel", action="append", help="only kernels of this name")
    parser.add_argument("--jobs", type=int, help="compilers at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheel")
    parser.add_argument("--cache", type=Path, help="of compiled kernels; default: in --work")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    activations = [ActivationType(name) for name in asked.activation or kinds]
    jobs, contents, left_out = plan(asked.part or list(PARTS), activations)
    if asked.kernel:
        jobs = {job: None for job in jobs if job.name in asked.kernel}
        contents, left_out = {}, [f"everything but {', '.join(asked.kernel)}"]
    cache = CompileCache(asked.cache or asked.work / "cache", asked.work / "local")
    artefacts = compiled(jobs, cache, asked.jobs)
    tree = asked.work / "tree"
    stage(tree)
    listed, platform = carry(artefacts, tree / "sonicmoe" / "carried")
    versions = {name: versions_here()[name] for name in ("abi", LOADER, "nvcc")}
    index = {"versions": versions, "contents": contents, "left_out": left_out, "artefacts": listed}
    text = json.dumps(index, indent=1)
    (tree / "sonicmoe" / "carried" / INDEX).write_text(text, encoding="utf-8")
    wheel = built(tree, platform, asked.out.resolve())
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{wheel} has {size >> 20} MiB; at most {MOST_BYTES >> 20} MiB: leave out a part")
    if listed:
        for_the_hub(tree, versions, hashlib.sha256(text.encode()).hexdigest(), asked.out)
    print(f"{len(listed)} kernels, {size / (1 << 20):.1f} MiB: {wheel}")


if __name__ == "__main__":
    main()
