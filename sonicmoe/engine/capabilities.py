"""Which engine can compute what: one record per engine, and the one rule that reads them.

The choice of an engine (`select.py`), warm-up (`compile_plan.py`), `sonicmoe doctor`, the engine
table of docs/engines.md and every message about an engine that cannot run ask here. Imports no
framework, so warm-up runs on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from ..architectures import ARCHITECTURES, SM90, SM100, SM103, SM120, SM121, Architecture
from ..enums import ACTIVATIONS, ActivationType, EngineName, ZCode
from ..errors import ConfigError, DTypeError, EngineUnavailableError, ShapeError, SonicMoEError
from ..jit.cache import default_cache
from ..jit.carried import carried
from ..jit.key import package_versions
from ..jit.plan import CompileJob
from ..jit.toolchain import find_toolkit
from ..jit.triton_variant import TritonVariant
from ..kernels.blackwell.quack_gemm import PACKAGES
from ..quant.recipes import RECIPES, rows
from .kernel_jobs import bf16_jobs, hopper_jobs, mxfp8_jobs, triton_jobs
from .settings import EngineSettings, GradientMode, TokenFormat, Workload

HOST = "host"  # in place of an architecture, where tensors are on no GPU
_TOKEN_BLOCK = rows(128)


Jobs = Callable[[Workload | None, str], tuple[CompileJob, ...]]


@dataclass(frozen=True)
class EngineRecord:
    """What one engine can compute, and what it needs.

    Attributes:
        gemms: how it multiplies, for the log line of a choice.
        architectures: those it has kernels for; empty: any device, the host included.
        dtypes: of tokens and weights, by name.
        recipes: FP8 recipes by name; None stands for unquantised operands.
        z_codes: codes of the saved z under a recipe; without one z has the dtype of the tokens.
        hidden_multiple, intermediate_multiple: of H and of I.
        proven: those of its architectures on which its tests have run. On the others it is tried
            before it runs (`trust.py`).
        loads_with: the package that loads and launches its kernels.
        compiler: the one that compiles its kernels, and those of its step.
        packages: those that compile its kernels, with the version its builders are written for.
        low_rank: whether it computes low-rank adapters on the projections.
        tokens: formats in which it reads tokens, and gradients of its output.
        by_name_only: `auto` never chooses it, because nobody has run it.
        jobs: its kernels for a workload and an architecture, as compile jobs. Without a workload,
            those of some workload, so that a missing compiler can be named.
    """

    name: EngineName
    gemms: str
    architectures: tuple[Architecture, ...]
    dtypes: tuple[str, ...]
    recipes: tuple[str | None, ...]
    activations: tuple[ActivationType, ...]
    z_codes: tuple[ZCode, ...]
    hidden_multiple: int
    intermediate_multiple: int
    biases: bool
    low_rank: bool = False
    tokens: tuple[TokenFormat, ...] = (TokenFormat.PLAIN,)
    gradients: tuple[GradientMode, ...] = (GradientMode.NATIVE,)
    proven: tuple[Architecture, ...] = ()
    loads_with: str | None = None
    compiler: str | None = "nvcc"
    packages: tuple[tuple[str, str], ...] = ()
    by_name_only: bool = False
    jobs: Jobs = field(default=lambda workload, arch: (), repr=False)

    def __reduce__(self) -> str:
        """The one of this file."""
        return self.name.name

    def quantises(self, fp8: bool) -> bool:
        """Whether it computes with FP8 operands, or (False) with unquantised ones."""
        return any((recipe is not None) == fp8 for recipe in self.recipes)

    def serves_auto(self, fp8: bool) -> bool:
        """Whether `auto` may choose it, for its kernels in this precision."""
        return bool(self.architectures) and self.quantises(fp8) and not self.by_name_only

    def is_proven(self, arch: str) -> bool:
        """Whether its tests have run on this architecture, by name."""
        return arch in [known.name for known in self.proven]

    def architecture(self, arch: str) -> Architecture | None:
        """The record of an architecture by name, if it has kernels for it."""
        return next((known for known in self.architectures if known.name == arch), None)


def _with_kernels_of(engine: EngineName) -> tuple[ActivationType, ...]:
    return tuple(member for member, record in ACTIVATIONS.items() if engine in record.kernels)


REFERENCE = EngineRecord(
    EngineName.REFERENCE,
    gemms="plain tensor operations in fp32",
    architectures=(),
    dtypes=("bfloat16", "float16", "float32"),
    recipes=(None, *RECIPES),
    activations=tuple(ActivationType),
    z_codes=tuple(ZCode),
    hidden_multiple=1,
    intermediate_multiple=1,
    biases=True,
    low_rank=True,
    tokens=tuple(TokenFormat),
    gradients=(GradientMode.NATIVE, GradientMode.MAIN_GRAD),
    compiler=None,
)
BF16 = EngineRecord(
    EngineName.BF16,
    gemms="grouped GEMMs in the dtype of the tokens",
    architectures=(SM90, SM100, SM103, SM120, SM121),
    dtypes=("bfloat16", "float16"),
    recipes=(None,),
    activations=_with_kernels_of(EngineName.BF16),
    z_codes=(),
    hidden_multiple=8,  # rows of 16 bytes, as TMA wants them
    intermediate_multiple=8,
    biases=True,
    low_rank=True,
    gradients=(GradientMode.NATIVE, GradientMode.MAIN_GRAD),
    proven=(SM90,),
    loads_with="apache-tvm-ffi",
    packages=tuple(PACKAGES.items()),  # elsewhere than on Hopper
    jobs=bf16_jobs,
)
TRITON = EngineRecord(
    EngineName.TRITON,
    gemms="grouped GEMMs in Triton",
    architectures=tuple(ARCHITECTURES.values()),
    dtypes=("bfloat16", "float16"),
    recipes=(None,),
    activations=_with_kernels_of(EngineName.TRITON),
    z_codes=(),
    hidden_multiple=8,  # rows of 16 bytes, as cp.async wants them
    intermediate_multiple=8,
    biases=True,
    low_rank=True,
    gradients=(GradientMode.NATIVE, GradientMode.MAIN_GRAD, GradientMode.FRESH),
    proven=(SM90,),
    loads_with="triton",
    compiler="Triton",
    jobs=triton_jobs,
)
HOPPER = EngineRecord(
    EngineName.HOPPER,
    gemms="FP8 GEMMs with fused activation",
    architectures=(SM90,),
    dtypes=("bfloat16",),
    recipes=("dx256",),
    activations=_with_kernels_of(EngineName.HOPPER),
    z_codes=(ZCode.ADAPTIVE, ZCode.INT8, ZCode.BF16),
    hidden_multiple=16,
    intermediate_multiple=64,
    biases=True,
    low_rank=True,
    tokens=(TokenFormat.PLAIN, TokenFormat.E4M3_1X128),
    gradients=(GradientMode.NATIVE, GradientMode.MAIN_GRAD, GradientMode.FRESH),
    proven=(SM90,),
    loads_with="apache-tvm-ffi",
    jobs=hopper_jobs,
)

MXFP8 = EngineRecord(
    EngineName.MXFP8,
    gemms="MXFP8 GEMMs with fused activation",
    architectures=(SM100, SM103),
    dtypes=("bfloat16",),
    recipes=("iso32-pow2",),
    activations=tuple(
        member for member in _with_kernels_of(EngineName.BF16) if ACTIVATIONS[member].gated
    ),
    z_codes=(ZCode.BF16,),
    hidden_multiple=32,  # the elements of a scale, along which both contractions are cut
    intermediate_multiple=32,
    biases=False,
    gradients=(GradientMode.NATIVE, GradientMode.MAIN_GRAD),
    loads_with="apache-tvm-ffi",
    packages=tuple(PACKAGES.items()),
    by_name_only=True,
    jobs=mxfp8_jobs,
)

# In the order in which `auto` prefers them.
RECORDS: dict[EngineName, EngineRecord] = {
    record.name: record for record in (HOPPER, MXFP8, BF16, TRITON, REFERENCE)
}


def problem(
    record: EngineRecord, workload: Workload | None = None, arch: str | None = None
) -> str | None:
    """Why this engine cannot compute this, in words fit for a log line, or None where it can.

    Args:
        record: of the engine.
        workload: what is to be computed; None asks about the architecture alone.
        arch: the name of an architecture, or `HOST`; None asks about the workload alone.
    """
    return next((text for _, text in _problems(record, workload, arch)), None)


def require(record: EngineRecord, workload: Workload) -> None:
    """Raise what `problem` finds in the workload: a ConfigError, DTypeError or ShapeError that names
    the engine and the reason.
    """
    for kind, text in _problems(record, workload, None):
        raise kind(f"the {record.name.value} engine cannot compute this: {text}")


Problems = Iterator[tuple[type[SonicMoEError], str]]


def _problems(record: EngineRecord, workload: Workload | None, arch: str | None) -> Problems:
    """The rule. Every comparison of a record with what is wanted is in these three functions."""
    # First, because on another architecture no other reason helps anybody.
    if arch is not None and record.architectures and record.architecture(arch) is None:
        known = ", ".join(map(str, record.architectures))
        found = "no GPU: tensors are on the host" if arch == HOST else f"the architecture is {arch}"
        yield EngineUnavailableError, f"{found}, and its kernels are for {known}"
    if workload is None:
        return
    if workload.dtype not in record.dtypes:
        takes = " or ".join(record.dtypes)
        yield DTypeError, f"tokens are {workload.dtype}, and it takes {takes}"
    yield from _format_problems(record, workload.settings, workload.tokens, "x")
    if workload.bias and not record.biases:
        yield ConfigError, "the experts have biases, and it has none"
    if workload.low_rank and not record.low_rank:
        yield ConfigError, "the experts have low-rank adapters, and it has no kernels for them"
    multiples = record.hidden_multiple, record.intermediate_multiple
    sizes = workload.hidden_size, workload.intermediate_size
    if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
        needs = f"it needs multiples of {multiples[0]} and {multiples[1]}"
        yield ShapeError, f"H is {sizes[0]} and I is {sizes[1]}, and {needs}"
    yield from _recipe_problems(record, workload.settings)
    activation = workload.settings.activation
    if activation not in record.activations:
        has = _values(record.activations)
        yield ConfigError, f"the activation is {activation.value!r}, and it has {has}"


def lost_on_gpus(workload: Workload) -> str | None:
    """What this workload loses on a GPU that has kernels, in words with the reason: FP8, or kernels
    at all. None where an engine with kernels takes it as it is. Asked before a model runs, on any
    machine.
    """
    reasons = _without_kernels(workload)
    if not reasons:
        return None
    if workload.settings.recipe is not None:
        plain = replace(workload, settings=replace(workload.settings, recipe=None))
        others = _without_kernels(plain)
        if not others:
            return f"a GPU computes it without FP8 ({'; '.join(reasons)})"
        reasons += others
    why = f"{'; '.join(reasons)}{remedy(workload)}"
    return f"a GPU computes it in plain tensor operations, which are slow ({why})"


def remedy(workload: Workload | None) -> str:
    """What makes kernels take these tokens, to be put behind the reasons why none does; empty where
    that is not in their dtype alone.
    """
    wrong = workload is not None and workload.dtype == "float32"
    return "; needed: a model in bfloat16, or autocast to it" if wrong else ""


def _without_kernels(workload: Workload) -> list[str]:
    """Every reason why no engine with kernels takes it in its precision; empty where one does."""
    reasons = []
    for name, record in RECORDS.items():
        if record.serves_auto(workload.settings.recipe is not None):
            found = [text for _, text in _problems(record, workload, None)]
            if not found:
                return []
            reasons += [f"not {name.value}: {reason}" for reason in found]
    return reasons


def format_problem(
    record: EngineRecord, settings: EngineSettings, form: TokenFormat, operand: str = "x"
) -> str | None:
    """Why this engine cannot take tokens ("x"), or gradients of its output ("dout"), in this format,
    or None. Their values, in bfloat16, it may still take.
    """
    return next((text for _, text in _format_problems(record, settings, form, operand)), None)


def _format_problems(
    record: EngineRecord, settings: EngineSettings, form: TokenFormat, operand: str
) -> Problems:
    recipe, what = settings.recipe, "tokens" if operand == "x" else "gradients"
    # Asked at every forward, so messages are composed for problems only.
    if form not in record.tokens:
        yield DTypeError, f"{what} come as {form.value!r}, and it takes {_values(record.tokens)}"
    elif form is TokenFormat.PLAIN:
        return
    elif recipe is None:
        yield ConfigError, f"{what} come as {form.value!r}, and FP8 is off"
    elif getattr(recipe, operand) != _TOKEN_BLOCK:
        come = f"{what} come as {form.value!r}"
        blocks = f"recipe {recipe.name!r} reads them in {getattr(recipe, operand)} blocks"
        yield ConfigError, f"{come}, and {blocks}"


def _recipe_problems(record: EngineRecord, settings: EngineSettings) -> Problems:
    recipe = settings.recipe.name if settings.recipe is not None else None
    # Without a recipe z has the dtype of the tokens, whatever `save_z` says.
    if recipe in record.recipes:
        if recipe is not None and settings.save_z not in record.z_codes:
            stores = " or ".join(map(repr, _values(record.z_codes)))
            yield ConfigError, f"z is saved as {settings.save_z.value!r}, and it stores {stores}"
    elif recipe is None:
        yield ConfigError, "FP8 is off, and its GEMMs are FP8"
    elif record.quantises(fp8=True):
        made_for = " or ".join(map(repr, filter(None, record.recipes)))
        yield ConfigError, f"the recipe is {recipe!r}, and its kernels are made for {made_for}"
    else:
        yield ConfigError, f"FP8 is on (recipe {recipe!r}), and it quantises nothing"


def _values(members: Iterable[Enum]) -> list[str]:
    return [member.value for member in members]


def missing_tool(record: EngineRecord, workload: Workload | None, arch: str) -> str | None:
    """Why this machine can neither compile nor load the engine's kernels, or None. A kernel that
    the compile cache holds needs no compiler.
    """
    loader = record.loads_with
    if loader and dict(package_versions(loader))[loader] == "absent":
        return f"{loader}, which loads and launches its kernels, is not installed"
    # A GPU node often has no compiler: kernels that were compiled elsewhere are enough.
    cache = default_cache()
    # The first job that can be had in no way is the answer.
    for job in record.jobs(workload, arch):
        reason = missing_package([job]) or _missing_compiler(job)
        if reason is not None and cache.try_load(job.key()) is None:
            short = carried().shortfall(arch)
            return f"{reason}; {short}" if short else reason
    return None


def missing_package(jobs: Iterable[CompileJob]) -> str | None:
    """The first package that compiles one of these kernels and is not of the pinned version, or
    not there.
    """
    jobs = tuple(jobs)
    in_triton = any(isinstance(job, TritonVariant) for job in jobs)
    # Triton is taken in any version: its kernels use the language and no internals.
    if in_triton and dict(package_versions("triton"))["triton"] == "absent":
        return "triton compiles its kernels, and it is absent"
    # Versions are pinned: the builders call internals of these packages.
    wanted = {package for job in jobs for package in getattr(job, "packages", ())}
    for name, found in package_versions(*PACKAGES):
        if name in wanted and found != PACKAGES[name]:
            return f"{name} {PACKAGES[name]} compiles its GEMMs, and it is {found}"
    return None


def _missing_compiler(job: CompileJob) -> str | None:
    # Triton brings its own assembler.
    if isinstance(job, TritonVariant) or find_toolkit() is not None:
        return None
    return "there is no nvcc to compile its kernels, and the compile cache does not hold them"
