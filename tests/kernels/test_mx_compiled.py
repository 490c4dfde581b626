"""MXFP8's GEMMs without a GPU, which `test_quack_gemm.py` compiles beside those of the BF16 engine:
they are what they should be.
"""

from __future__ import annotations

from kernels.mx_matrix import every_mx_variant, mx_shape

from sonicmoe.engine.capabilities import MXFP8
from sonicmoe.kernels.blackwell import mx_gemm
from sonicmoe.kernels.blackwell.mx_gemm import (
    MxGemms,
    all_kernels,
    dgated_kernel,
    up_kernel,
    wgrad_kernel,
)
from sonicmoe.kernels.blackwell.quack_gemm import Stored


def test_variants_of_a_model():
    shape = mx_shape("sm_100a")
    names = [kernel.name for kernel in all_kernels(shape)]
    assert names.count("mxfp8_up") == names.count("mxfp8_wgrad") == 2 and len(names) == 7
    capped = all_kernels(mx_shape("sm_100a", capped=True))
    assert not {*capped} & {*all_kernels(shape)}
    # up with and without z, and dgated, for each further activation; the capped ones
    assert len(every_mx_variant("sm_100a")) == 2 * 7 + 3 * (len(MXFP8.activations) - 1)


def test_launches_take_their_operands_in_order(monkeypatch):
    """Where gradients are contiguous along the other axis, operands change places."""
    launched = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def load(self):
            return lambda *arguments: launched.append((self.name, *arguments))

    for make in (up_kernel, dgated_kernel, wgrad_kernel, mx_gemm.down_kernel, mx_gemm.dgrad_kernel):
        name = make.__name__
        monkeypatch.setattr(
            mx_gemm, name, lambda shape, name=name, **own: Kernel((name, *own.values()))
        )
    gemms = MxGemms(mx_shape("sm_100a"), 148)
    assert gemms.dprob_tiles(768) == 3 and gemms.dprob_tiles(800) == 4
    x, w, y1 = ("x", "xs"), ("w", "ws"), ("y", "ys")
    gemms.up(x, w, "z", y1, "cu")
    gemms.up(x, w, None, y1, "cu")
    gemms.up_again(x, w, "z", "cu")
    gemms.down(y1, w, "y2", "cu")
    gemms.dgated(x, w, "dz", "z", "y1s", "p", "parts", "cu")
    gemms.dgrad(x, w, "dx", "cu")
    assert launched == [
        (("up_kernel", True), "x", "xs", "w", "ws", "z", "y", "ys", "cu", 74),
        (("up_kernel", False), "x", "xs", "w", "ws", None, "y", "ys", "cu", 74),
        (("down_kernel",), "x", "xs", "w", "ws", "z", "cu", 74),
        (("down_kernel",), "y", "ys", "w", "ws", "y2", "cu", 74),
        (("dgated_kernel",), "x", "xs", "w", "ws", "dz", "z", "y1s", "p", "parts", "cu", 74),
        (("dgrad_kernel",), "x", "xs", "w", "ws", "dx", "cu", 74),
    ]
    launched.clear()
    for stored in Stored:
        gemms.wgrad_up(x, y1, "dw", "cu", stored)
    gemms.wgrad_down(x, y1, "dw", "cu")
    gemms.wgrad_down(x, y1, "dw", "cu", Stored.HIDDEN)
    x_first = ("x", "xs", "y", "ys", "dw", "cu", 74)
    y_first = ("y", "ys", "x", "xs", "dw", "cu", 74)
    assert [one[0][1:] for one in launched] == [(), (), (True,), (), ()]
    assert [one[1:] for one in launched] == [x_first, y_first, y_first, x_first, y_first]
