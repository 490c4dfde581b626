"""What both loaders of the stub `paddlefleet_ops` share: the finder that blocks imports, and the
import of the engine that lies in the folder of the ops.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from contextlib import contextmanager
from pathlib import Path

VENDORED = Path(__file__).parent / "vendored"


class HardwareIncompatibleBlocker(importlib.abc.MetaPathFinder):
    """Raises the stored message for a blocked module and everything below it."""

    def __init__(self, error_messages):
        self.error_messages = error_messages

    def find_spec(self, fullname, path, target=None):
        for name, message in self.error_messages.items():
            if fullname == name or fullname.startswith(f"{name}."):
                raise RuntimeError(message)


@contextmanager
def own_import(name, folder):
    """Inside, the top-level package `name` is the one of `folder`; afterwards it is what it was."""

    def those():
        return [key for key in sys.modules if key == name or key.startswith(f"{name}.")]

    before = {key: sys.modules.pop(key) for key in those()}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for key in those():
            del sys.modules[key]
        sys.modules.update(before)


def load_engine(name):
    """Import the vendored top-level package and file it, with what it imported, under
    `paddlefleet_ops.`.
    """
    with own_import(name, VENDORED):
        module = importlib.import_module(name)
        for key in list(sys.modules):
            if key == name or key.startswith(f"{name}."):
                sys.modules[f"paddlefleet_ops.{key}"] = sys.modules[key]
    return module
