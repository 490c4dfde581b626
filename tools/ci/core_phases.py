"""The phases of the core tests: each measures figures, core_tests.py judges them.

Figures of precision are named by what was computed, not by who did it: every engine of this machine
is held to one gate.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numerics_cases import DATA_KINDS, make_case

from sonicmoe.bench.cost_model import TILE_ROWS
from sonicmoe.bench.runner import measure
from sonicmoe.bench.shapes import SHAPES, Shape
from sonicmoe.bench.timing import MIB, Memory, measure_memory
from sonicmoe.bench.workload import Batch, Layer, NodeCall, Variant, available_variants
from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.golden_stages import TENSORS, golden_tensors
from sonicmoe.diagnostics.stage_runner import run_stages
from sonicmoe.engine.select import choose_engine
from sonicmoe.enums import EngineName
from sonicmoe.quant.format import Code
from sonicmoe.quant.gpu import quantize_rows
from sonicmoe.quant.recipes import RECIPES, ScaleFormat, iso, rows
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.backends import find_device

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BENCHMARKS = ROOT / "benchmarks"
PRECISION_SIZES = CaseSizes(tokens=512, hidden=512, intermediate=256, experts=8, topk=2)
DEFAULT_RECIPE = "dx256"
REPEATS = 3
LAYER_SHAPE = Shape(96, 128, 128, 4, 2)
MEMORY_SHAPES = {"E=8": Shape(512, 256, 256, 8, 4), "E=32, I/4": Shape(512, 256, 64, 32, 16)}
FAST_LAYERS, ALL_LAYERS = 6, 48
INVALID_SHARE = 0.9
WALL_BAR_TOKENS = 2048  # below, a step waits for the host and the bar does not hold


class NotHere(Exception):
    """The machine lacks what the phase needs; the message says what."""


@dataclass(frozen=True)
class Phase:
    """One mechanism. `only_slow`: prefixes of figures that the fast run leaves out; `gates`:
    (suffix, gate) of new baselines.
    """

    name: str
    measure: Callable[[bool], dict[str, Any]]
    slow: bool = False
    only_slow: tuple[str, ...] = ()
    gates: tuple[tuple[str, dict[str, Any]], ...] = ()

    def measures(self, figure: str, fast: bool) -> bool:
        """Whether this run has the figure."""
        return not (fast and figure.startswith(self.only_slow)) if self.only_slow else True

    def default_gate(self, figure: str) -> dict[str, Any]:
        """How a figure without a baseline is to be gated."""
        return next(
            (gate for suffix, gate in self.gates if figure.endswith(suffix)), {"gate": "equal"}
        )


def engines() -> list[Variant]:
    """The reference engine in both precisions, and every GPU engine of this machine."""
    found = [Variant(EngineName.REFERENCE, mode) for mode in ("perf", "off")]
    return found + [
        v for v in available_variants(find_device()) if v.engine is not EngineName.REFERENCE
    ]


def precision(fast: bool) -> dict[str, Any]:
    """Relative RMSE and cosine of out, dx, ds, dw1, dw2 against fp64; of several engines the worst."""
    figures: dict[str, Any] = {}
    device = find_device()
    for kind in ("gaussian",) if fast else tuple(DATA_KINDS):
        case = make_case(kind, PRECISION_SIZES, seed=0)
        wanted = golden_tensors(case)
        for variant in engines():
            step = case.but(recipe=DEFAULT_RECIPE if variant.fp8 else None)
            run = run_stages(step, choose_engine(device, variant.engine).engine, device)
            if run.error is not None:
                raise RuntimeError(f"{variant}: {run.error}")
            for name in TENSORS:
                values = run.stages[name].values.astype(np.float64)
                norms = np.linalg.norm(values) * np.linalg.norm(wanted[name])
                key = f"{kind} {'fp8' if variant.fp8 else 'bf16'} {name}"
                rmse = float(np.linalg.norm(values - wanted[name]) / np.linalg.norm(wanted[name]))
                cosine = float((values * wanted[name]).sum() / norms)
                figures[f"{key} rmse"] = max(rmse, figures.get(f"{key} rmse", 0.0))
                figures[f"{key} cosine"] = min(cosine, figures.get(f"{key} cosine", 1.0))
    return figures


def digests(variant: Variant, device: str, seed: int = 0) -> list[str]:
    """Digest of every result of one forward, backward and step."""
    layer = Layer(LAYER_SHAPE, device, seed)
    torch.manual_seed(seed + 1)
    batch = Batch.random(LAYER_SHAPE, device)
    call = NodeCall(layer.node(variant), batch)
    call.forward()
    out = call.out
    call.backward()
    call.step()
    assert out is not None and batch.x.grad is not None and batch.probs.grad is not None
    gradients = [p.main_grad for e in layer.experts for p in e.parameters()]
    return [digest(tensor) for tensor in (out, batch.x.grad, batch.probs.grad, *gradients)]


def digest(tensor: torch.Tensor) -> str:
    """Of the bits, in row-major order."""
    return hashlib.sha256(
        tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def determinism(fast: bool) -> dict[str, Any]:
    """Results that differ between repetitions, and (whole run) between processes."""
    device = find_device()
    figures: dict[str, Any] = {}
    for variant in engines():
        first = digests(variant, device)
        repeats = [digests(variant, device) for _ in range(REPEATS - 1)]
        figures[f"{variant} differing results"] = sum(
            a != b for other in repeats for a, b in zip(first, other, strict=True)
        )
        if not fast:
            program = (
                "import sys, json; sys.path[:0] = sys.argv[1:4]; import core_phases as c; "
                "print(json.dumps(c.digests(c.Variant.parse(sys.argv[4]), c.find_device())))"
            )
            answer = subprocess.run(
                [sys.executable, "-c", program, str(ROOT), str(ROOT / "benchmarks"), str(HERE), str(variant)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            figures[f"process: {variant} differing results"] = sum(
                a != b
                for a, b in zip(first, json.loads(answer.stdout.splitlines()[-1]), strict=True)
            )
    return figures


def layers(fast: bool) -> dict[str, Any]:
    """A deep residual stack on mostly invalid slots, uninitialised memory full of NaN: finite, and
    the bits of a clean run.
    """
    device, depth = find_device(), FAST_LAYERS if fast else ALL_LAYERS
    figures: dict[str, Any] = {}
    for variant in engines():
        clean = stack_gradient(variant, device, depth)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            poisoned = stack_gradient(variant, device, depth)
        finally:
            torch.use_deterministic_algorithms(False)
        figures[f"{variant} not finite"] = int((~torch.isfinite(clean)).sum())
        figures[f"{variant} differing from clean memory"] = int((clean != poisoned).sum())
    return figures


def stack_gradient(variant: Variant, device: str, depth: int) -> torch.Tensor:
    """dx of `depth` pre-norm residual layers, the second of two steps."""
    nodes = [Layer(LAYER_SHAPE, device, seed).node(variant) for seed in range(depth)]
    torch.manual_seed(3)
    batch = Batch.random(LAYER_SHAPE, device)
    batch.indices[torch.rand(batch.indices.shape[0], device=device) < INVALID_SHARE] = -1
    for _ in range(2):
        batch.x.grad = None
        hidden = batch.x
        for node in nodes:
            normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
            hidden = hidden + node(normed, None, batch.indices, batch.probs)
        hidden.backward(batch.dout)
        for node in nodes:
            node.step()
    assert batch.x.grad is not None
    return batch.x.grad


def quantisers(fast: bool) -> dict[str, Any]:
    """Digests of codes and scales of fixed inputs, all block shapes and codes in use, NaN, infinity
    and zeros among them.

    Taken on the host, so that every machine has the same; on a GPU its kernel must give the host's
    codes and scales.
    """
    rng = np.random.default_rng(7)
    values = rng.standard_normal((256, 512)) * 2.0 ** rng.uniform(-20, 20, (256, 1))
    values[3, 5], values[130, 200], values[77] = np.nan, np.inf, 0.0
    x = torch.tensor(values.astype(np.float32))
    figures: dict[str, Any] = {}
    for code, block in (
        (Code.E4M3, rows(128)),
        (Code.E4M3, iso(128)),
        (Code.INT8, rows(128)),
        (Code.ADAPTIVE, rows(128)),
        (Code.E4M3, RECIPES["dx256"].dz),
    ):
        for scales in ScaleFormat:
            q = quantize(x, block, code, scales)
            # NaN has many spellings; where it stands is what counts
            scale = torch.nan_to_num(q.scale_inv, nan=-1.0)
            figures[f"{code.value} {block} {scales.value}"] = (
                digest(q.codes.view(torch.uint8))[:16] + digest(scale)[:16]
            )
    if find_device() != "cpu":
        ours, wanted = quantize_rows(x.to(find_device())), quantize(x, rows(128))
        for name in ("codes", "scale_inv"):
            a, b = (getattr(q, name).to(torch.float32).cpu() for q in (ours, wanted))
            figures[f"gpu {name} differing from the host"] = int(
                (~torch.isclose(a, b, 0, 0, equal_nan=True)).sum()
            )
    return figures


def calls(fast: bool) -> dict[str, Any]:
    """Calls of functions that the host makes for a layer of a small step, per face, precision and
    experts: a count is steady where a time is not.
    """
    _need_native()
    if not importlib.util.find_spec("transformers"):
        raise NotHere("needs transformers")
    given = {
        "--precision": ("fp8", "bf16"),
        "--face": (
            *("node", "stacked", "step", "MoE"),
            *("transformers", "written", "gathered", "frozen"),
        ),
        "--experts": ("8", "128"),
    }
    options = [word for name, values in given.items() for value in values for word in (name, value)]
    command = [sys.executable, str(BENCHMARKS / "host_bench.py"), "--count", *options]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return found


def _need_native() -> None:
    for need, found in (
        ("nvcc", shutil.which("nvcc")),
        ("apache-tvm-ffi", importlib.util.find_spec("tvm_ffi")),
    ):
        if not found:
            raise NotHere(f"needs {need}")


def jit(fast: bool) -> dict[str, Any]:
    """Cold, warm, reload and reuse of the compile cache, and a race, as ratios within this run."""
    _need_native()
    size = ["--processes", "2", "--repeat", "1"] if fast else []
    command = [sys.executable, str(BENCHMARKS / "jit_bench.py"), "--json", *size]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "warm over cold": found["warm_s"] / found["cold_s"],
        "reload over cold": found["reload_s"] / found["cold_s"],
        "reuse over cold": found["reuse_s"] / found["cold_s"],
        "builds per race": found["builds_per_race"],
        "race over one process": found["race_ratio"],
    }


def memory(fast: bool) -> dict[str, Any]:
    """Bytes saved between the passes per element of z (padding rows included), flat in expert
    granularity; on a GPU the peak at the reference shape.
    """
    device = find_device()
    figures: dict[str, Any] = {}
    for variant in engines():
        if variant.engine is EngineName.REFERENCE and device != "cpu":
            continue  # its temporaries are its own business
        for name, shape in MEMORY_SHAPES.items():
            batch = Batch.random(shape, device)
            elements = (
                sum(-(-count // TILE_ROWS) * TILE_ROWS for count in batch.counts)
                * 2
                * shape.intermediate
            )
            saved = settled_memory(variant, shape, batch, device).saved
            figures[f"{variant} saved bytes per z, {name}"] = round(saved * MIB / elements, 4)
        if device != "cpu":
            shape = SHAPES["reference"]
            memory = settled_memory(variant, shape, Batch.random(shape, device), device)
            figures[f"{variant} peak MiB, reference"] = memory.peak
    return figures


def settled_memory(variant: Variant, shape: Shape, batch: Batch, device: str) -> Memory:
    """Of the second call: accumulators and caches come with the first."""
    call = NodeCall(Layer(shape, device).node(variant), batch)
    measure_memory(call, device)
    return measure_memory(call, device)


def performance(fast: bool) -> dict[str, Any]:
    """FP8 against BF16 in one run, and wall against busy time of training steps; never an absolute
    time.
    """
    device = find_device()
    variants = {v.engine: v for v in available_variants(device)}
    if not {EngineName.BF16, EngineName.HOPPER} <= set(variants):
        raise NotHere(
            f"needs both GPU engines; this machine runs {[name.value for name in variants]}"
        )
    figures: dict[str, Any] = {}
    for shape in (SHAPES["reference-1k"], SHAPES["reference-2k"], SHAPES["reference"]):
        engines = [variants[EngineName.BF16], variants[EngineName.HOPPER]]
        bf16, fp8 = measure(shape, engines)
        if not (bf16.steady and bf16.steady_busy and fp8.steady and fp8.steady_busy):
            raise NotHere(
                "needs a profiler; the driver lets nobody profile here (NVreg_RestrictProfilingToAdminUsers)"
            )
        figures[f"T={shape.tokens} busy fp8 over bf16"] = fp8.steady_busy / bf16.steady_busy
        figures[f"T={shape.tokens} wall fp8 over bf16"] = fp8.steady.median / bf16.steady.median
        if shape.tokens >= WALL_BAR_TOKENS:
            figures[f"T={shape.tokens} wall over busy fp8"] = fp8.steady_ratio
    return figures


def processes(fast: bool) -> dict[str, Any]:
    """Ranks of their own with a shared cold cache; see multicard_smoke.py."""
    size = ["--ranks", "2", "--steps", "2"] if fast else ["--ranks", "4"]
    command = [sys.executable, str(BENCHMARKS / "multicard_smoke.py"), "--json", *size]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(
            f"multicard_smoke.py ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}"
        )
    found = json.loads(answer.stdout)
    return {
        name: found[name]
        for name in (
            "failed_ranks",
            "unmoved_parameters",
            "differing_parameters",
            "gap_to_one_process",
        )
    }


def gpu_suites(fast: bool) -> dict[str, Any]:
    """tests/gpu: every kernel against its reference."""
    if find_device() == "cpu":
        raise NotHere("needs an NVIDIA Hopper GPU")
    workers = ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", *workers]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return {"exit code": answer.returncode}


MOST, LEAST, EQUAL = ({"gate": kind} for kind in ("most", "least", "equal"))
PHASES: tuple[Phase, ...] = (
    Phase("precision", precision, only_slow=tuple(k for k in DATA_KINDS if k != "gaussian"),
          gates=(("rmse", MOST | {"tolerance": 0.03}), ("cosine", LEAST | {"tolerance": 0.0002}))),
    Phase("determinism", determinism, only_slow=("process:",), gates=(("", EQUAL),)),
    Phase("layers", layers, gates=(("", EQUAL),)),
    Phase("quantisers", quantisers, gates=(("", EQUAL),)),
    Phase("memory", memory, gates=(("", MOST | {"tolerance": 0.02}),)),
    Phase("calls", calls, gates=(("", MOST | {"tolerance": 0.05}),)),
    Phase("jit", jit, gates=(("builds per race", EQUAL), ("", MOST))),
    Phase("processes", processes, gates=(("gap_to_one_process", MOST), ("", EQUAL))),
    Phase("performance", performance, slow=True, gates=(("", MOST | {"tolerance": 0.05}),)),
    Phase("gpu suites", gpu_suites, slow=True, gates=(("", EQUAL),)),
)  # fmt: skip
