"""What both loaders of the stub `paddlefleet_ops` share: the finder that blocks imports, and why the
engine that Fleet ships is blocked on this machine.
"""

from __future__ import annotations

import importlib.abc

# Fleet asks Paddle and Python. Here it is said, because the answers of a CPU build would end every
# path at its first question.
HOPPER = "capability 10.0 (Blackwell) is needed, found (9, 0)"


class HardwareIncompatibleBlocker(importlib.abc.MetaPathFinder):
    """Raises the stored message for a blocked module and everything below it."""

    def __init__(self, error_messages):
        self.error_messages = error_messages

    def find_spec(self, fullname, path, target=None):
        for name, message in self.error_messages.items():
            if fullname == name or fullname.startswith(f"{name}."):
                raise RuntimeError(message)
