"""Warm-up from inside a program: compile everything a training run of a model needs, once per
cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .architectures import chosen_arch
from .config import SonicMoEConfig, current_config
from .engine.compile_plan import require_precision, warm_up_plan
from .enums import ActivationParameters, ActivationType, layer_parameters, member_of
from .errors import ConfigError, DeviceError, expect
from .host import capabilities_of_host
from .jit.cache import default_cache
from .jit.errors import CompileError
from .jit.parallel import FAILED, Progress
from .jit.plan import BF16, BOTH, FP8, NEITHER, ModelSpec, WarmUpPlan
from .jit.warmup import WarmUpReport, warm_up

# The device decides nothing but whether there is anything to compile: the CPU runs the reference
# engine.
_DEVICE_TYPES = ("cuda", "gpu", "cpu")


def warmup_jit(
    E: int,
    H: int,
    I: int,
    device: object = "cuda",
    *,
    precision: str | None = None,
    dtype: str = "bfloat16",
    activation: ActivationType | str = ActivationType.SWIGLU,
    activation_parameters: Mapping[str, float | None] | ActivationParameters | None = None,
    adapters: bool = False,
    arch: str | None = None,
    jobs: int | None = None,
    cache_dir: Path | str | None = None,
    config: SonicMoEConfig | None = None,
    progress: Progress | None = None,
) -> WarmUpReport:
    """Compile every kernel of an expert MLP into the cache; what is there already is not compiled
    again.

    Needs no GPU. Call it on one rank, or on all: of ranks that start together one compiles each
    kernel.

    Args:
        E: local experts.
        H: hidden size.
        I: expert intermediate size.
        device: where the model will run ("cuda", "cuda:3", Paddle's "gpu:3", or an object that
            prints as one, such as a `torch.device`); "cpu" needs nothing.
        precision: "fp8", "bf16" or "both", each with all that `recompute_z` may ask for, and "fp8"
            with what `fp8_wgrad=False` needs where the configuration says that. Default: that of
            `config` where it sets `fp8_mode`, else both, as a program may choose FP8 call by call.
        dtype: dtype of tokens and parameters.
        activation: the expert's activation.
        activation_parameters: numbers of it that the layers set. On Blackwell they are compiled in:
            layers with others need a warm-up of their own there.
        adapters: also what experts with low-rank adapters (LoRA) need.
        arch: the GPU architecture to compile for; default: that of this host's GPUs, and
            `architectures.DEFAULT_ARCH` where it has none.
        jobs: compilers at once; default: the CPUs that this process may use.
        cache_dir: instead of the configured one.
        config: instead of the configuration in force.
        progress: called once per kernel with its outcome.

    Raises:
        ConfigError: a dimension, dtype, activation, parameter or precision is not understood, or
            `precision` names one that has no kernels for this model; without it the report says
            what was left out, and why. Or no engine has kernels for `arch`, or it is not given, and
            GPUs of several are here.
        DeviceError: the device is neither a CUDA device nor "cpu".
        CompileError: a kernel did not compile; the others are in the cache. CompileForbiddenError
            and ToolchainError are kinds of it.
    """
    compiles = _compiles_for(device)
    allowed = config is None or isinstance(config, SonicMoEConfig)
    expect(allowed, ConfigError, f"config is {config!r}; needed: a SonicMoEConfig, or None")
    settings = current_config(config)
    if cache_dir is not None:
        settings = settings.replace(cache_dir=Path(cache_dir))
    kind = member_of(ActivationType, activation, "activation")
    own = layer_parameters(kind, activation_parameters)
    # Nothing is compiled for a CPU, so the GPUs of the host have no say then.
    arch = chosen_arch(arch, capabilities_of_host() if compiles else ())
    spec = ModelSpec(E, H, I, dtype, kind.value, arch, own, adapters)
    needed = _plan(spec, precision, config) if compiles else WarmUpPlan((), NEITHER)
    cache = default_cache(settings)
    report = warm_up(spec, cache, jobs=jobs, progress=progress, compile_jobs=needed)
    failed = [outcome.message for outcome in report.kernels if outcome.state == FAILED]
    if failed:
        words = f"{len(failed)} of {len(report.kernels)} kernels did not compile:"
        raise CompileError("\n".join([words, *failed]))
    return report


def _compiles_for(device: object) -> bool:
    """Whether a model on this device needs kernels; DeviceError where it is none."""
    kind = str(device).split(":", maxsplit=1)[0]
    needed = f"one of {list(_DEVICE_TYPES)}, with an index"
    expect(kind in _DEVICE_TYPES, DeviceError, f"device={device!r}; needed: {needed}")
    return kind != "cpu"


def _plan(spec: ModelSpec, precision: str | None, config: SonicMoEConfig | None) -> WarmUpPlan:
    """The kernels; a precision that was asked for must have some."""
    planned = warm_up_plan(spec, precision or _precision_of(config), current_config(config))
    return require_precision(planned, precision) if precision else planned


def _precision_of(config: SonicMoEConfig | None) -> str:
    """What a program can run: one precision where its own configuration fixes it."""
    if config is None or config.fp8_mode is None:
        return BOTH
    return FP8 if config.resolve().fp8 else BF16
