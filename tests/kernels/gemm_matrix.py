"""Which variants of the BF16 GEMMs there are for an architecture and a family: what the spill gate
and `tools/ci/compile_matrix.py` compile.
"""

from __future__ import annotations

from dataclasses import replace

from sonicmoe.enums import ActivationType
from sonicmoe.kernels.blackwell import quack_gemm
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel
from sonicmoe.kernels.blackwell.quack_gemm import (
    STORED,
    MlpShape,
    Stored,
    all_kernels,
    candidates,
    wgrad_kernel,
)
from sonicmoe.kernels.blackwell.quack_tilings import PRODUCTS, GemmConfig, family_of

SWIGLU = ActivationType.SWIGLU
# With these the epilogues compute all that they can: a softcap of up is off by default.
OWN = {ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 25.0))}
# (architecture compiled for, family of the GEMM class). The last one can be run on Hopper.
TARGETS = (
    ("sm_100a", "sm100"),
    ("sm_103a", "sm100"),
    ("sm_120a", "sm120"),
    ("sm_121a", "sm120"),
    ("sm_90a", "sm120"),
)


def shape_for(arch: str, family: str = "", **changes: object) -> MlpShape:
    """3072 and 1536, which the widest tile of every product divides, in SwiGLU without biases."""
    return replace(
        MlpShape(3072, 1536, SWIGLU, arch=arch, family=family or family_of(arch)),
        **changes,  # type: ignore[arg-type]
    )


def tiled(product: str, config: GemmConfig, shape: MlpShape) -> CuteKernel:
    """The variant of one product with one tiling."""
    if product in STORED:
        return wgrad_kernel(product, shape, STORED[product][0], config)
    make = getattr(quack_gemm, f"{product}_kernel")
    return make(shape, config=config, **({"store_z": True} if product == "up" else {}))


def every_variant(shape: MlpShape) -> tuple[CuteKernel, ...]:
    """Each tiling of each product; each activation and bias with each tiling of `up` and one of the
    others; another dtype; where the hardware hands out tiles, also without that.
    """
    variants = [
        tiled(product, config, shape)
        for product in PRODUCTS
        for config, _ in candidates(product, shape)
    ]
    for activation in ActivationType:
        for bias in (False, True):
            own = OWN.get(activation, ())
            other = replace(shape, activation=activation, bias=bias, parameters=own)
            variants += all_kernels(other, recompute_z=True)
            variants += [tiled("up", config, other) for config, _ in candidates("up", other)]
    for changes in ({"dtype": "float16"}, {"capped": True}):
        variants += all_kernels(replace(shape, **changes), recompute_z=True)  # type: ignore[arg-type]
    variants += [
        wgrad_kernel("wgrad_up", shape, stored, config)
        for stored in Stored
        for config, _ in candidates("wgrad_up", shape)
    ]
    return tuple(dict.fromkeys(variants))


# Their formulas are those of a gate: of GeGLU, of its tanh form, and of ReGLU.
ALSO_GATES = {ActivationType.GELU, ActivationType.GELU_TANH, ActivationType.RELU}


def dgated_of_every_formula(arch: str) -> list[CuteKernel]:
    """It computes values and slopes; `up`, values alone."""
    return [
        quack_gemm.dgated_kernel(shape_for(arch, activation=kind, parameters=OWN.get(kind, ())))
        for kind in ActivationType
        if kind not in ALSO_GATES
    ]


def few_variants(arch: str, family: str) -> tuple[CuteKernel, ...]:
    """What the gate compiles for a target: each kind of product once, with the choices that take most
    registers.
    """
    shape = shape_for(arch, family)
    crowded = replace(shape, activation=ActivationType.GELU, bias=True)
    every = {
        "up": quack_gemm.up_kernel(crowded, store_z=True),
        "dgated": quack_gemm.dgated_kernel(shape),
        # Without gates an epilogue of sm100 gets two elements at a time.
        "dgated without gates": quack_gemm.dgated_kernel(crowded if family == "sm100" else shape),
        "dgrad": quack_gemm.dgrad_kernel(shape),
        "wgrad": wgrad_kernel("wgrad_up", shape, Stored.HALVES),
    }
    # A further architecture of a family has the instructions of the first one, and its registers.
    if arch != next(known for known, of in TARGETS if of == family):
        return (every["dgated"],)
    return tuple(dict.fromkeys(every.values()))
