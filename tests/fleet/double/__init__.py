"""PaddleFleet's side of Sonic MoE, written from its contract, in real Paddle on the CPU.

    site/           `paddlefleet`: configuration, dispatch and combine, experts, layer, callback
    deep_ep.py      DeepEP's buffer on one rank
    optimizer.py    masters, fused buffers, storage that is given up
    reference.py    experts in plain Paddle
    model.py        a small language model with one such layer, and its trainer

`importable()` has the first and `paddlefleet_ops` with either loader be imported under their real
names, and takes them away again.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
# As an importer that found no GPU of compute capability 10.
EAGER = """
__version__ = "0.3"
_SONIC_MOE_AVAILABLE = False
blocked_import_messages = {
    "paddlefleet_ops.flash_mask": "flash_mask not supported",
    "paddlefleet_ops.sonicmoe": "sonicmoe not supported: Blackwell required",
}


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE


class Blocker:
    def __init__(self, error_messages):
        self.error_messages = error_messages

    def find_spec(self, fullname, path, target=None):
        for name, message in self.error_messages.items():
            if fullname == name or fullname.startswith(name + "."):
                raise RuntimeError(message)


def __getattr__(name):
    if f"paddlefleet_ops.{name}" in blocked_import_messages:
        raise RuntimeError(blocked_import_messages[f"paddlefleet_ops.{name}"])
    raise AttributeError(name)


sys.meta_path.insert(0, Blocker(blocked_import_messages))
"""
# The engine is blocked until it is loaded; the flag says whether it can be.
LOADER = """
def load_sonic_moe():
    raise RuntimeError("sonicmoe not supported: Blackwell required")
"""
SOURCES = {"eager": EAGER, "lazy": EAGER + LOADER}
# What Fleet's ops do besides as they are imported: DeepEP, and one more library under Paddle's proxy,
# which is then switched off for everybody.
BESIDES = """
import paddle
from fleet.double import deep_ep
sys.modules["paddlefleet_ops.deep_ep"] = deep_ep
paddle.enable_compat(scope={"triton"}, silent=True)
paddle.disable_compat()


def is_deep_ep_available():
    return True
"""


def write(folder, source=EAGER):
    """`paddlefleet_ops` as a file below `folder`; what has to be on the path for both packages."""
    package = Path(folder, "paddlefleet_ops")
    package.mkdir()
    (package / "__init__.py").write_text("import sys\n" + source + BESIDES)
    return [str(folder), str(HERE / "site")]


@contextmanager
def importable(folder, source):
    """Both packages, on a Hopper GPU that Fleet's own engine refuses."""
    assert not loaded(), loaded()
    path, finders = sys.path[:], sys.meta_path[:]
    sys.path[:0] = write(folder, source)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        for name in loaded():
            del sys.modules[name]


def loaded():
    """The modules of both packages in this process."""
    return {
        name for name in sys.modules if name.split(".")[0] in ("paddlefleet", "paddlefleet_ops")
    }
