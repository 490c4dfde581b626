"""DeepGEMM beside our engines: the operands it is handed, and the table of its figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_deep_gemm import make_module
from framework import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from deepgemm_gemms import PeerError, prepare

from sonicmoe.bench.shapes import Shape
from sonicmoe.observe import ranges_on

SHAPE = Shape(150, 256, 128, 4, 2)
COUNTS = [130, 0, 128, 42]  # partly filled blocks, none at all, whole ones
TINY = Shape(16, 128, 128, 2, 1)


def test_the_six_products_are_handed_what_deepgemm_takes_and_are_right():
    module = make_module()
    prepare(module, SHAPE, [COUNTS], "cpu")
    rows, padded = sum(COUNTS), 256 + 128 + 128
    assert module.calls.log == [
        ("rows", 4, rows, 256, 256),  # z of x: 2 I by H
        ("rows", 4, rows, 256, 128),  # out of y: H by I
        ("rows", 4, rows, 128, 256),  # dy of dout: I by H
        ("rows", 4, rows, 256, 256),  # dx of dz: H by 2 I
        ("experts", 4, padded, 256, 128),  # dw2: H by I
        ("experts", 4, padded, 256, 256),  # dw1: 2 I by H
    ]

    # Sizes that all differ show which one each product takes.
    module.calls.log.clear()
    prepare(module, Shape(8, 640, 256, 2, 2), [[8, 8]], "cpu")
    assert [call[3:] for call in module.calls.log] == [
        (512, 640), (640, 256), (256, 640), (640, 512), (640, 256), (512, 640),
    ]  # fmt: skip


def test_phases_and_steps_run_forward_and_backward_in_order():
    module, opened = make_module(), []
    six = prepare(module, SHAPE, [COUNTS], "cpu")

    class Range:
        def __init__(self, name):
            opened.append(name.removeprefix("sonicmoe."))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    forward, backward = ["up", "down"], ["dgated", "dx_gemm", "dw2", "dw1"]
    with ranges_on(Range):
        for name, run_phase in six.phases(0):
            assert name == ("backward" if opened else "forward")
            run_phase()
        assert opened == forward + backward
        opened.clear()
        stack = six.steps(2)
        stack.run()
    assert stack.layers == 2 and opened == 2 * forward + 2 * backward


def wrong(kind):
    """A library whose results are not the product of the operands."""
    module = make_module()
    right = getattr(module, kind)

    def spoiled(a, b, d, *more):
        right(a, b, d, *more)
        d.mul_(1.05)

    return {kind: spoiled}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (wrong("m_grouped_fp8_gemm_nt_contiguous"), "up is off by .* of its norm"),
        (wrong("k_grouped_fp8_gemm_nt_contiguous"), "dw2 is off by .* of its norm"),
        ({"m_grouped_fp8_gemm_nt_contiguous": lambda *_: None}, "up is off by nan"),
        ({"m_grouped_fp8_gemm_nt_contiguous": lambda a, b, d: None}, "TypeError: .*positional"),
        ({"get_mk_alignment_for_contiguous_layout": lambda: 240}, "aligns experts to 240 rows"),
    ],
)
def test_another_interface_is_said_and_not_timed(changes, message):
    with pytest.raises(PeerError, match=message):
        prepare(make_module(**changes), SHAPE, [COUNTS], "cpu")


def test_sizes_and_gpus_that_it_does_not_take_are_named(monkeypatch):
    with pytest.raises(PeerError, match="intermediate is 96; needed: a multiple of 128"):
        prepare(make_module(), Shape(8, 128, 96, 2, 1), [[8, 0]], "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(PeerError, match=r"compute capability 10\.0; needed: 9\.0"):
        prepare(make_module(), TINY, [[16, 0]], "cuda:0")
