"""MXFP8's GEMMs without a GPU, which `test_quack_gemm.py` compiles beside those of the BF16 engine:
they are what they should be.
"""

from __future__ import annotations

from kernels.mx_matrix import mx_shape

from sonicmoe.kernels.blackwell import mx_gemm
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel


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
