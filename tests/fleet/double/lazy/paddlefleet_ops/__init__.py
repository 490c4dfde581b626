"""The stub with the loader of Fleet's open change: Sonic is imported by `load_sonic_moe()`, and is
blocked until then.
"""

import sys

import paddle
from fleet.double import deep_ep, ops

_SONIC_MOE_AVAILABLE = False
blocked_import_messages = {
    "paddlefleet_ops.sonicmoe": f"paddlefleet_ops.sonicmoe not supported: {ops.HOPPER}"
}
sys.modules["paddlefleet_ops.deep_ep"] = deep_ep
sys.meta_path.insert(0, ops.HardwareIncompatibleBlocker(blocked_import_messages))
paddle.enable_compat(scope={"triton"}, silent=True)
paddle.disable_compat()


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE


def is_deep_ep_available():
    return True


def load_sonic_moe():
    """Where the machine could run it, the import of the engine, once."""
    raise RuntimeError(blocked_import_messages["paddlefleet_ops.sonicmoe"])


def __getattr__(name):
    if f"paddlefleet_ops.{name}" in blocked_import_messages:
        raise RuntimeError(blocked_import_messages[f"paddlefleet_ops.{name}"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
