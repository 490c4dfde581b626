"""The stub with today's loader: what can run would be imported here and now, what cannot is blocked."""

import sys

import paddle
from fleet.double import deep_ep, ops

_SONIC_MOE_AVAILABLE = False
blocked_import_messages = {
    "paddlefleet_ops.sonicmoe": f"paddlefleet_ops.sonicmoe not supported: {ops.HOPPER}. "
    "Set using_sonic_moe=False."
}
sys.modules["paddlefleet_ops.deep_ep"] = deep_ep
sys.meta_path.insert(0, ops.HardwareIncompatibleBlocker(blocked_import_messages))
# Fleet imports one more library under its proxy, and then switches every scope off.
paddle.enable_compat(scope={"triton"}, silent=True)
paddle.disable_compat()


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE


def is_deep_ep_available():
    return True


def __getattr__(name):
    if f"paddlefleet_ops.{name}" in blocked_import_messages:
        raise RuntimeError(blocked_import_messages[f"paddlefleet_ops.{name}"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
