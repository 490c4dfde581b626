"""Every engine of this build on the GPU that is here, as `engine/trust.py` tries one: for the report
that a maintainer gets from somebody else's GPU.

Needs a loaded framework.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..engine.capabilities import RECORDS, EngineRecord, missing_tool, problem
from ..engine.cold_start import compile_ahead, run_jobs
from ..engine.select import ENGINES
from ..engine.settings import EngineSettings, Workload
from ..engine.trust import Subject, UndecidedError, try_engine
from ..enums import ActivationType, EngineName
from ..host import driver_version
from ..quant.recipes import RECIPES
from ..routing.backends import arch_of, index_of_gpu

# Larger than those of the self-test: more than one tile and one block in every direction.
H, I = 512, 256


@dataclass(frozen=True)
class EngineTrial:
    """One engine with one workload. verdict: "passed", "failed", "undecided" or "not tried";
    reason: why not "passed". cases: the events of `engine.trial.judged`, with the errors of every
    output against the reference engine and the seconds of a warm call.
    """

    engine: str
    workload: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    cases: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Gpu:
    """The device, and what runs on it: versions of the driver and of the framework's CUDA."""

    name: str
    arch: str
    proven: list[str]
    driver: str
    cuda: str
    memory_bytes: int
    multiprocessors: int


def gpu_of(device: str) -> Gpu:
    """The facts of a GPU that decide what runs on it; `proven`: engines whose tests ran on such."""
    arch = arch_of(device)
    about = torch.cuda.get_device_properties(index_of_gpu(device))
    proven = [name.value for name, record in RECORDS.items() if record.is_proven(arch)]
    return Gpu(
        str(about.name),
        arch,
        proven,
        driver_version(),
        str(torch.version.cuda),
        int(about.total_memory),
        int(about.multi_processor_count),
    )


def try_all(device: str, progress: Callable[[str], None]) -> Iterator[EngineTrial]:
    """Every engine but the reference engine with every workload of `workloads_of`. Compiles what is
    missing; never raises for what an engine does.
    """
    arch, wanted = arch_of(device), []
    for name, record in RECORDS.items():
        if not record.architectures:  # the reference engine, which trials compare with
            continue
        reason = problem(record, None, arch) or missing_tool(record, None, arch)
        if reason is not None:
            yield EngineTrial(name.value, "any", "not tried", reason)
            continue
        wanted += [(name, record, workload) for workload in workloads_of(record)]
    # Trial by trial only a few kernels are missing at a time, and most processors would wait.
    jobs = [job for _, record, workload in wanted for job in run_jobs(record, workload, arch)]
    progress(f"compiling for {len(wanted)} trials")
    compile_ahead(tuple(dict.fromkeys(jobs)))
    for name, record, workload in wanted:
        progress(f"{name.value}: {words_of(workload)}")
        yield _tried(name, record, workload, device)


def _tried(name: EngineName, record: EngineRecord, workload: Workload, device: str) -> EngineTrial:
    arch, words = arch_of(device), words_of(workload)
    started = time.perf_counter()
    try:
        verdict = try_engine(Subject(ENGINES[name], record, workload, device, arch))
    except UndecidedError as undecided:
        return EngineTrial(name.value, words, "undecided", str(undecided))
    seconds = time.perf_counter() - started
    found = "passed" if verdict.trusted else "failed"
    return EngineTrial(name.value, words, found, verdict.reason, seconds, list(verdict.cases))


def workloads_of(record: EngineRecord) -> list[Workload]:
    """Every activation, dtype, recipe, form of the saved z and of the weight gradients that the
    engine has, and biases: one after the other, not all combinations.
    """
    # The first recipe and code that the record lists are what a run would take by default.
    recipe = next((name for name in record.recipes if name is not None), None)
    usual = EngineSettings(recipe=None if recipe is None else RECIPES[recipe])
    if recipe is not None:
        usual = replace(usual, save_z=record.z_codes[0])
    settings = [
        *(replace(usual, activation=activation) for activation in record.activations),
        *(replace(usual, recipe=RECIPES[name]) for name in record.recipes if name is not None),
        *([replace(usual, recipe=None)] if None in record.recipes else []),
        *(replace(usual, save_z=code) for code in record.z_codes if recipe is not None),
        replace(usual, recompute_z=True),
        *([replace(usual, fp8_wgrad=False)] if recipe is not None else []),
    ]
    wanted = [
        *(Workload(one, H, I, record.dtypes[0]) for one in settings),
        *(Workload(usual, H, I, dtype) for dtype in record.dtypes),
        Workload(replace(usual, activation=ActivationType.GELU), H, I, record.dtypes[0], bias=True),
        Workload(usual, H, I, record.dtypes[0], bias=True),
    ]
    return [one for one in dict.fromkeys(wanted) if problem(record, one) is None]


def words_of(workload: Workload) -> str:
    """`swiglu, bfloat16, dx256, z in int8, H=512, I=256`."""
    settings = workload.settings
    recipe = settings.recipe
    words = [settings.activation.value, workload.dtype]
    words += [recipe.name, f"z in {settings.save_z.value}"] if recipe is not None else []
    words += ["recomputed z"] * settings.recompute_z + ["biases"] * workload.bias
    words += ["unquantised weight gradients"] * (recipe is not None and not settings.fp8_wgrad)
    return ", ".join([*words, f"H={workload.hidden_size}", f"I={workload.intermediate_size}"])
