"""Ranks watch each other, so that a rank that dies stops all the others at once instead of leaving
them in a collective for ever.

A star of TCP connections around rank 0 runs beside the collectives. A process that ends, however it
ends, closes its connection. A process that hangs stops its heartbeats. Rank 0 passes the news on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

BEAT, BYE, FAILED, LOST = "beat", "bye", "failed", "lost"
SILENCE_S = 60.0
BEATS_PER_SILENCE = 6


class RankWatch:
    """One rank's end. `on_lost(reason)` runs at most once, on a thread of its own, as soon as
    another rank is known to be gone.

    Use `listen` on rank 0, tell the others the port, then construct on every rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: tuple[str, int],
        on_lost: Callable[[str], None],
        *,
        listener: socket.socket | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Connect; returns when the star stands.

        Raises:
            OSError: rank 0 cannot be reached, or a rank did not come, within `silence_s`.
        """
        self._rank, self._on_lost, self._silence_s = rank, on_lost, silence_s
        self._lock, self._ended, self._reason = threading.Lock(), False, ""
        self._lost = threading.Event()
        if listener is not None:
            self._peers = self._accept(listener, world_size - 1)
        else:
            link = socket.create_connection(address, timeout=silence_s)
            link.sendall(f"{rank}\n".encode())
            self._peers = {0: link}
        for peer, link in self._peers.items():
            # The timeout of a read is the alarm: a peer that sends no heartbeat for this long ends
            # `_hear` with TimeoutError.
            link.settimeout(silence_s)
            threading.Thread(target=self._hear, args=(peer, link), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    @staticmethod
    def listen() -> socket.socket:
        """Rank 0's listening socket, on a free port."""
        return socket.create_server(("", 0))

    def close(self) -> None:
        """This rank has finished well; the others may go on."""
        self._end(BYE)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: tell the others why."""
        if self._rank == 0:
            self._end(f"{LOST} rank 0 failed: {reason}")
        else:
            self._end(f"{FAILED} {reason}")

    def wait_for_news(self, seconds: float) -> bool:
        """Wait up to `seconds` for the news that another rank is gone; whether it came.

        When a rank dies, the collective that it was in may fail here a moment before the news
        comes.
        """
        return self._lost.wait(seconds)

    def _accept(self, listener: socket.socket, count: int) -> dict[int, socket.socket]:
        listener.settimeout(self._silence_s)
        peers = {}
        with listener:
            for _ in range(count):
                link, _ = listener.accept()
                link.settimeout(self._silence_s)
                # Connections come in any order, so each rank says who it is. The buffered reader
                # may take a first heartbeat with it, which nobody misses.
                peers[int(link.makefile("r").readline())] = link
        return peers

    def _end(self, message: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._tell(message)
        # Close the sending half only: the other rank reads the message, and then the stream's end.
        for link in self._peers.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)

    def _beat(self) -> None:
        while not self._ended:
            self._tell(BEAT)
            time.sleep(self._silence_s / BEATS_PER_SILENCE)

    def _hear(self, peer: int, link: socket.socket) -> None:
        try:
            for line in link.makefile("r", errors="replace"):
                word, _, rest = line.strip().partition(" ")
                # A rank that has finished well closes its connection next; that end must not count
                # as a death.
                if word == BYE:
                    return
                if word in (FAILED, LOST):
                    return self._report(rest if word == LOST else f"rank {peer} failed: {rest}")
            # The stream ended without a goodbye. The operating system closes the connections of a
            # process however it ends.
            reason = f"rank {peer} is gone (its process ended)"
        except TimeoutError:
            reason = f"rank {peer} has not been heard of for {self._silence_s:g} s"
        except OSError:
            reason = f"rank {peer} is gone (its connection broke)"
        return self._report(reason)

    def _report(self, reason: str) -> None:
        with self._lock:
            # Several threads may notice one death, and a death after this rank's own end is no
            # news.
            if self._ended or self._reason:
                return
            self._reason = reason
        if self._rank == 0:
            self._tell(f"{LOST} {reason}")
        # First the flag and then the callback, because the callback usually ends the process.
        self._lost.set()
        self._on_lost(reason)

    def _tell(self, message: str) -> None:
        # One line per message: a reason with line breaks would be read as several.
        line = (" ".join(message.split()) + "\n").encode(errors="replace")
        for link in self._peers.values():
            with suppress(OSError):
                link.sendall(line)
