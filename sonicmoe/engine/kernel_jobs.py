"""The kernels of each engine, as compile jobs: for a workload, or for some workload where None is
given, so that a missing compiler can be named. Imports neither a framework nor a compiler.
"""

from __future__ import annotations

from ..architectures import SM90
from ..jit.plan import CompileJob
from ..kernels.blackwell import mx_quantize_source
from ..kernels.blackwell.mx_gemm import MxShape
from ..kernels.blackwell.mx_gemm import all_kernels as mx_kernels
from ..kernels.blackwell.quack_gemm import MlpShape, all_kernels, wgrad_kernels
from ..kernels.cuda_wgrad import expert_rows_source, low_rank_source
from ..kernels.host import program_source
from ..kernels.sm90 import bf16_sources, engine_sources, gathers_first
from ..kernels.triton.variants import ExpertShape, all_variants
from .settings import EngineSettings, Workload

# Any workload serves where only packages and compilers are asked about.
_SOME = Workload(EngineSettings(), 128, 128)


def hopper_jobs(workload: Workload | None, arch: str) -> tuple[CompileJob, ...]:
    """Its own kernels serve every model of an activation; unquantised weight gradients run on the
    BF16 GEMMs.
    """
    workload = workload or _SOME
    settings = workload.settings
    form = settings.save_z, workload.bias, workload.low_rank
    jobs: tuple[CompileJob, ...] = (*engine_sources(arch, settings.activation, *form),)
    if settings.fp8_wgrad:
        return jobs
    # Which sums the gradients of biases too.
    sums = (expert_rows_source(arch),) if workload.bias else ()
    return *jobs, *sums, bf16_sources(arch, settings.activation)["bf16_wgrad"]


def bf16_jobs(workload: Workload | None, arch: str) -> tuple[CompileJob, ...]:
    """The GEMMs, and the kernels that count and sum rows. On Hopper they serve every model of an
    activation.
    """
    workload = workload or _SOME
    if arch == SM90.name:
        activation, rows_first = (
            workload.settings.activation,
            gathers_first(workload.intermediate_size),
        )
        form = workload.dtype, rows_first, workload.separate, workload.low_rank
        beside = (low_rank_source(arch),) if workload.low_rank else ()
        gemms = bf16_sources(arch, activation, *form).values()
        return expert_rows_source(arch), program_source(arch), *beside, *gemms
    shape, again = _mlp_shape_of(workload, arch), workload.settings.recompute_z
    return expert_rows_source(arch), *all_kernels(shape, recompute_z=again)


def triton_jobs(workload: Workload | None, arch: str) -> tuple[CompileJob, ...]:
    """Everything that it launches."""
    workload = workload or _SOME
    sizes = workload.hidden_size, workload.intermediate_size
    shape = expert_shape(workload.settings, sizes, workload.dtype, workload.bias, arch)
    return all_variants(shape, recompute_z=workload.settings.recompute_z)


def mxfp8_jobs(workload: Workload | None, arch: str) -> tuple[CompileJob, ...]:
    """Its own GEMMs and quantisers; unquantised weight gradients run on the BF16 GEMMs."""
    workload = workload or _SOME
    settings = workload.settings
    kernels = mx_kernels(mx_shape(settings, arch), fp8_wgrad=settings.fp8_wgrad)
    jobs: tuple[CompileJob, ...] = (mx_quantize_source(arch), expert_rows_source(arch), *kernels)
    return jobs if settings.fp8_wgrad else (*jobs, *wgrad_kernels(_mlp_shape_of(workload, arch)))


def mlp_shape(
    settings: EngineSettings, sizes: tuple[int, int], dtype: str, bias: bool, arch: str
) -> MlpShape:
    """What the BF16 GEMMs are compiled for; sizes: H and I."""
    own, capped = settings.activation_parameters, settings.gemm_num_sms > 0
    return MlpShape(*sizes, settings.activation, dtype, bias, own, capped, arch=arch)


def expert_shape(
    settings: EngineSettings, sizes: tuple[int, int], dtype: str, bias: bool, arch: str
) -> ExpertShape:
    """What the Triton kernels are compiled for; sizes: H and I."""
    own = settings.activation_parameters
    return ExpertShape(*sizes, settings.activation, dtype, bias, own, arch=arch)


def mx_shape(settings: EngineSettings, arch: str) -> MxShape:
    """What the MXFP8 GEMMs are compiled for, whatever the sizes."""
    own, capped = settings.activation_parameters, settings.gemm_num_sms > 0
    return MxShape(settings.activation, own, capped, arch=arch)


def _mlp_shape_of(workload: Workload, arch: str) -> MlpShape:
    sizes = workload.hidden_size, workload.intermediate_size
    return mlp_shape(workload.settings, sizes, workload.dtype, workload.bias, arch)
