"""A network-like file system by fault injection: a rename shows at once where it was made, later
elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path

from sonicmoe.jit.files import StoreFiles
from sonicmoe.jit.place import Place


class LateFiles(StoreFiles):
    """Hides a directory that another host published less than `delay_s` seconds ago.

    `ledger` is a directory that plays the server: it knows who published what and when (the
    monotonic clock is one for all processes of the machine).
    """

    def __init__(self, ledger: Path, host: str, delay_s: float) -> None:
        self.ledger, self.host, self.delay_s = ledger, host, delay_s
        self.hidden = 0

    def names(self, folder: Place) -> list[str]:
        return [name for name in super().names(folder) if self._visible(name)]

    def publish(self, source: Place, target: Place) -> None:
        (self.ledger / target.name).write_text(f"{self.host} {time.monotonic()}")
        super().publish(source, target)

    def _visible(self, name: str) -> bool:
        entry = self.ledger / name
        if not entry.exists():
            return True
        host, published = entry.read_text().split() or (self.host, "0")
        visible = host == self.host or time.monotonic() - float(published) >= self.delay_s
        self.hidden += not visible
        return visible
