"""Which variants of the MXFP8 GEMMs there are: what the spill gate and `tools/ci/compile_matrix.py`
compile.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.gemm_matrix import OWN

from sonicmoe.engine.capabilities import MXFP8
from sonicmoe.enums import ActivationType
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel
from sonicmoe.kernels.blackwell.mx_gemm import MxShape, all_kernels, up_kernel, wgrad_kernel

ARCHS = tuple(architecture.name for architecture in MXFP8.architectures)


def mx_shape(arch: str, **changes: object) -> MxShape:
    return replace(MxShape(ActivationType.SWIGLU, arch=arch), **changes)  # type: ignore[arg-type]


def every_mx_variant(arch: str) -> tuple[CuteKernel, ...]:
    """Each activation, with its own parameters where it takes some; and all of one model without
    the hardware's tiles.
    """
    variants = [*all_kernels(mx_shape(arch)), *all_kernels(mx_shape(arch, capped=True))]
    for activation in MXFP8.activations:
        own = OWN.get(activation, ())
        variants += all_kernels(mx_shape(arch, activation=activation, parameters=own))
    return tuple(dict.fromkeys(variants))


def few_mx_variants() -> tuple[CuteKernel, ...]:
    """What the gate compiles: the fused product with most outputs, and a contraction over ragged
    rows.
    """
    shape = mx_shape(ARCHS[0])
    return up_kernel(shape, store_z=True), wgrad_kernel(shape, halves=True)
