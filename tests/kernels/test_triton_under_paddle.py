"""How Triton's launches get device, stream and tensors under Paddle, as far as a host can tell."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from framework import IS_PADDLE, torch

if not IS_PADDLE or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton under Paddle", allow_module_level=True)

from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from sonicmoe.enums import ActivationType
from sonicmoe.kernels.triton import launches
from sonicmoe.kernels.triton.variants import ExpertShape, variant
from sonicmoe.routing.backends import take_driver_from_paddle


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


def test_its_tensors_are_launched_as_was_compiled_ahead():
    own = launches.Calls(ExpertShape(64, 40, ActivationType.SWIGLU, arch="sm_80"))

    def tensor(*size, dtype=torch.bfloat16):
        return torch.empty(size, dtype=dtype)

    cut = (tensor(size, dtype=torch.int32) for size in (128, 1, 3))
    of = launches.Rows(*cut, tensor(3, dtype=torch.int64), 128, 2)
    x, z, y1, w1 = tensor(7, 64), tensor(128, 80), tensor(128, 40), tensor(2, 80, 64)
    place = launches.native_place("wgrad_up", own, tensor(2, 80, 64, dtype=torch.float32))
    for call, product, choices in (
        (own.up(x, w1, None, z, y1, of), "up", {"store_z": True, "store_y1": True}),
        (own.wgrad_up(x, z, place, of), "wgrad_up", {"gradient": "float32", "step_m": 0}),
    ):
        ahead = call.kernel.ahead(*call.arguments, arch="sm_80", **call.options)
        assert ahead.key() == variant(product, own.shape, **choices).key(), product
