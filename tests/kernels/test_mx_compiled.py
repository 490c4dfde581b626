"""MXFP8's GEMMs without a GPU, which `test_quack_gemm.py` compiles beside those of the BF16 engine:
they are what they should be.
"""

from __future__ import annotations

from kernels.mx_matrix import every_mx_variant, mx_shape

from sonicmoe.engine.capabilities import MXFP8
from sonicmoe.kernels.blackwell import mx_gemm
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel
from sonicmoe.kernels.blackwell.mx_gemm import all_kernels


def test_variants_of_a_model():
    shape = mx_shape("sm_100a")
    names = [kernel.name for kernel in all_kernels(shape)]
    assert names.count("mxfp8_up") == names.count("mxfp8_wgrad") == 2 and len(names) == 7
    capped = all_kernels(mx_shape("sm_100a", capped=True))
    assert not {*capped} & {*all_kernels(shape)}
    # up with and without z, and dgated, for each further activation; the capped ones
    assert len(every_mx_variant("sm_100a")) == 2 * 7 + 3 * (len(MXFP8.activations) - 1)


def test_every_variant_is_launched_on_clusters_of_two(monkeypatch):
    launched = []
    monkeypatch.setattr(
        CuteKernel, "load", lambda self: lambda *given: launched.append((self, *given))
    )
    shape = mx_shape("sm_100a")
    gemms, kernels = mx_gemm.mx_gemms.__wrapped__(shape, 148), mx_gemm.variants(shape)
    assert mx_gemm.dprob_tiles(768) == 3 and mx_gemm.dprob_tiles(800) == 4
    for name in kernels:
        gemms.launch(name, "operand")
    assert launched == [(kernel, "operand", 74) for kernel in kernels.values()]
