"""A network-like file system by fault injection: a rename shows at once where it was made, later
elsewhere.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from sonicmoe.jit import files
from sonicmoe.jit.place import Place


def inject(ledger: Path, host: str, delay_s: float) -> None:
    """Make this process one of `host`, to which a directory that another host has published less than
    `delay_s` seconds ago is hidden.

    `ledger` is a directory that plays the server: it knows who published what and when (the
    monotonic clock is one for all processes of the machine).
    """
    names, publish = files.names, files.publish

    def visible(name: str) -> bool:
        entry = ledger / name
        if not entry.exists():
            return True
        publisher, published = entry.read_text().split() or (host, "0")
        return publisher == host or time.monotonic() - float(published) >= delay_s

    def late_publish(source: Place, target: Place) -> None:
        (ledger / target.name).write_text(f"{host} {time.monotonic()}")
        publish(source, target)

    socket.gethostname = lambda: host
    files.names = lambda folder: [name for name in names(folder) if visible(name)]
    files.publish = late_publish
