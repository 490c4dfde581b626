"""The stub with the loader of Fleet's open change: Sonic is imported by `load_sonic_moe()`, and is
blocked until then.
"""

import sys

import paddle
from fleet.double import deep_ep, machine, ops

_SONIC_MOE_AVAILABLE = not machine.current.why_not()
_LOADED = False
blocked_import_messages = {}
sys.modules["paddlefleet_ops.deep_ep"] = deep_ep


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE


def is_deep_ep_available():
    return True


def load_sonic_moe():
    """Import the engine at its first call; nothing at any later one."""
    global _LOADED, sonicmoe
    if _LOADED:
        return
    if not is_sonic_moe_available():
        raise RuntimeError(blocked_import_messages["paddlefleet_ops.sonicmoe"])
    paddle.enable_compat(scope={"sonicmoe", "quack", "triton"}, silent=True)
    try:
        blocked_import_messages.pop("paddlefleet_ops.sonicmoe", None)
        sonicmoe = ops.load_engine("sonicmoe")
    finally:
        paddle.disable_compat()
    _LOADED = True


if machine.current.cuda_build:
    blocked_import_messages["paddlefleet_ops.sonicmoe"] = (
        "paddlefleet_ops.sonicmoe is imported on demand: call load_sonic_moe() first"
        if is_sonic_moe_available()
        else f"paddlefleet_ops.sonicmoe not supported: {'; '.join(machine.current.why_not())}"
    )
    sys.meta_path.insert(0, ops.HardwareIncompatibleBlocker(blocked_import_messages))
    paddle.enable_compat(scope={"triton"}, silent=True)
    paddle.disable_compat()


def __getattr__(name):
    if f"paddlefleet_ops.{name}" in blocked_import_messages:
        raise RuntimeError(blocked_import_messages[f"paddlefleet_ops.{name}"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
