"""The framework under test. `SONICMOE_TEST_FRAMEWORK=paddle` runs the same suites through Paddle's
torch proxy.

One process holds one flavour of the package, so the choice is an environment variable and not a
fixture. Import this module before anything of `sonicmoe`.
"""

from __future__ import annotations

import os

import one_thread  # noqa: F401, for processes without conftest.py

# isort: split
import numpy as np

NAME = os.environ.get("SONICMOE_TEST_FRAMEWORK", "torch")
IS_PADDLE = NAME == "paddle"
if IS_PADDLE:
    import paddle

    paddle.enable_compat(scope={"sonicmoe"}, silent=True)

from sonicmoe.interop import torch  # noqa: E402

if not IS_PADDLE:
    torch.set_num_threads(1)


def tensor(array, dtype=None, grad=False):
    """A tensor of the framework under test from anything numpy takes; `grad` makes it a leaf that
    wants a gradient.
    """
    array = np.asarray(array)
    made = paddle.to_tensor(array) if IS_PADDLE else torch.tensor(array)
    if dtype is not None:
        made = made.to(dtype)
    if IS_PADDLE:
        made.stop_gradient = not grad
        return made
    return made.requires_grad_(grad)


def parameter(array, dtype=None):
    """A trainable leaf parameter."""
    if not IS_PADDLE:
        return torch.nn.Parameter(tensor(array, dtype))
    value = tensor(array, dtype)
    dtype = str(value.dtype).removeprefix("paddle.")
    made = paddle.create_parameter(
        list(value.shape), dtype, default_initializer=paddle.nn.initializer.Constant(0.0)
    )
    made.set_value(value)
    return made


def numpy(value):
    """fp64 (floating) or int64 numpy copy of a tensor, exact for every dtype the package uses."""
    value = value.detach()
    text = str(value.dtype)
    if "float" in text:
        return np.asarray(
            value.to(torch.float32).tolist()
            if 0 in tuple(value.shape)
            else value.to(torch.float32).numpy(),
            dtype=np.float64,
        ).reshape(tuple(value.shape))
    if "bool" in text:
        return np.asarray(value.numpy(), dtype=bool)
    return np.asarray(value.to(torch.int64).numpy(), dtype=np.int64)


def relative_rmse(actual, golden):
    """||actual - golden|| / ||golden|| in fp64 (0 when both vanish)."""
    actual, golden = np.asarray(actual, np.float64), np.asarray(golden, np.float64)
    norm = np.linalg.norm(golden)
    return float(np.linalg.norm(actual - golden) / norm) if norm else float(np.linalg.norm(actual))


def recomputed(function, *arguments, use_reentrant=True):
    """Either framework's activation recompute: the forward runs now, and again in backward."""
    if IS_PADDLE:
        from paddle.distributed.fleet.utils import recompute

        return recompute(function, *arguments, use_reentrant=use_reentrant)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *arguments, use_reentrant=use_reentrant)


def want_gradient(leaf, wanted):
    """Both frameworks' spelling of whether autograd wants a gradient."""
    if hasattr(leaf, "stop_gradient"):
        leaf.stop_gradient = not wanted
    else:
        leaf.requires_grad_(wanted)
