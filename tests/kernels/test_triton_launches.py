"""How Triton's launches get device, stream and tensors, as far as a host can tell."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from framework import IS_PADDLE, torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from sonicmoe.enums import ActivationType
from sonicmoe.kernels.triton import launches
from sonicmoe.kernels.triton.variants import ExpertShape, variant
from sonicmoe.routing.backends import take_driver_from_paddle


@pytest.mark.skipif(not IS_PADDLE, reason="PyTorch is Triton's own way")
def test_device_and_stream_are_asked_of_paddle(monkeypatch):
    """Also where PyTorch cannot be imported, as in an installation of Paddle alone."""
    monkeypatch.setattr(nvidia, "CudaUtils", lambda: "utilities of the driver")
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    take_driver_from_paddle()
    active = driver.active
    paddle = sys.modules["paddle"]
    assert active.get_current_stream is paddle.base.libpaddle._get_current_raw_stream
    for name in ("current_device", "get_device_capability"):
        mine = {"current_device": active.get_current_device}.get(name, active.get_device_capability)
        assert mine is getattr(torch.cuda, name) and "paddle" in mine.__module__
    monkeypatch.setattr(active, "get_current_device", lambda: 0)
    monkeypatch.setattr(active, "get_device_capability", lambda device: (8, 6))
    assert active.get_current_target().arch == 86


def test_a_launch_is_what_was_compiled_ahead():
    """Token counts, addresses and strides are no part of a key, and tensors are what mocks are."""
    own = launches.Calls(ExpertShape(64, 40, ActivationType.SWIGLU, arch="sm_80"))

    def tensor(*size, dtype=torch.bfloat16):
        return torch.empty(size, dtype=dtype)

    def rows_of(experts, rows):
        sizes = ((rows,), (rows // 128,), (experts + 1,))
        cut = (tensor(*size, dtype=torch.int32) for size in sizes)
        return launches.Rows(*cut, tensor(experts + 1, dtype=torch.int64), rows, experts)

    for experts, rows in ((1, 128), (16, 4096)):
        of = rows_of(experts, rows)
        x, w1 = tensor(77, 64), tensor(experts, 80, 64)
        z, y1 = tensor(rows, 80), tensor(rows, 40)
        dw1 = tensor(experts, 80, 64, dtype=torch.float32)
        # A view off any alignment, as routing metadata may come.
        prob = tensor(rows + 1, dtype=torch.float32)[1:]
        partials = tensor(own.dprob_tiles, rows, dtype=torch.float32)
        place = launches.native_output("wgrad_up", own, dw1)
        moved = place._replace(stride_expert=4, stride_part=8, pitch=12, adds=False)
        table = place._replace(addresses=tensor(experts, dtype=torch.int64))
        wgrad = {"gradient": "float32", "step_m": 0}
        for call, product, choices in (
            (own.up(x, w1, None, z, y1, of), "up", {"store_z": True, "store_y1": True}),
            (own.dgated(x, w1, z, z, y1, prob, partials, of), "dgated", {}),
            *((own.wgrad_up(x, z, p, of), "wgrad_up", wgrad) for p in (place, moved, table)),
        ):
            ahead = call.kernel.ahead(*call.arguments, arch="sm_80", **call.options)
            wanted = variant(product, own.shape, **choices)
            assert ahead.key() == wanted.key(), product
