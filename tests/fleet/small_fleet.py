"""As little of PaddleFleet as the installer meets: `paddlefleet_ops` with either of its loaders, and
one module that asks for the engine when it is imported. Written to a folder and imported from there.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager

BLOCKER = """
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
"""

# As an importer that found no GPU of compute capability 10.
EAGER = f"""
import sys
__version__ = "0.3"
_SONIC_MOE_AVAILABLE = False
blocked_import_messages = {{
    "paddlefleet_ops.flash_mask": "flash_mask not supported",
    "paddlefleet_ops.sonicmoe": "sonicmoe not supported: Blackwell required",
}}


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE

{BLOCKER}
sys.meta_path.insert(0, Blocker(blocked_import_messages))
"""

# The engine is blocked until it is loaded; the flag says whether it can be.
LAZY = f"""
import sys
_SONIC_MOE_AVAILABLE = False
_loaded = []
blocked_import_messages = {{
    "paddlefleet_ops.sonicmoe": "sonicmoe not supported: Blackwell required by load_sonic_moe()",
}}


def is_sonic_moe_available():
    return _SONIC_MOE_AVAILABLE


def load_sonic_moe():
    _loaded.append("the engine that Fleet ships")
    raise RuntimeError("sonicmoe not supported: Blackwell required")

{BLOCKER}
sys.meta_path.insert(0, Blocker(blocked_import_messages))
"""
SOURCES = {"eager": EAGER, "lazy": LAZY}

# A module that binds names at import. The second spelling waits until a layer is made.
ASKS_AT_IMPORT = """
from paddlefleet_ops import is_sonic_moe_available

HAVE_SONIC_MOE = is_sonic_moe_available()
if HAVE_SONIC_MOE:
    from paddlefleet_ops.sonicmoe.quack_utils import quantize_activation_blockscaled_fast
else:
    quantize_activation_blockscaled_fast = None
"""
ASKS_LATER = """
import paddlefleet_ops

quantize_activation_blockscaled_fast = None


def _load_sonic_symbols():
    global quantize_activation_blockscaled_fast
    paddlefleet_ops.load_sonic_moe()
    from paddlefleet_ops.sonicmoe.quack_utils import quantize_activation_blockscaled_fast
"""
READER = "paddlefleet.transformer.moe.fused_a2a"


def write(folder, ops=None, reader=ASKS_AT_IMPORT):
    """The packages as files below `folder`."""
    if ops is not None:
        (folder / "paddlefleet_ops").mkdir(parents=True)
        (folder / "paddlefleet_ops/__init__.py").write_text(ops)
    package = folder / "paddlefleet/transformer/moe"
    package.mkdir(parents=True)
    for level in (package, package.parent, package.parent.parent):
        (level / "__init__.py").write_text("")
    (package / "fused_a2a.py").write_text(reader)


@contextmanager
def importable(folder):
    """`folder` on the path; what was imported from there is forgotten afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    before = sys.meta_path[:]
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path[:] = before
        for name in loaded():
            del sys.modules[name]


def loaded():
    """The modules of both packages in this process."""
    return {
        name for name in sys.modules if name.split(".")[0] in ("paddlefleet", "paddlefleet_ops")
    }
