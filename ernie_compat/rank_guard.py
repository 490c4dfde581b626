"""Around a run of several ranks: a failure here is told to the others, a failure there ends this
process, in one line each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from sonicmoe.errors import SonicMoEError

from .liveness import SILENCE_S, RankWatch
from .parallel import Parallel

EXIT_LOST = 1
NEWS_S = 10.0


class RankGuard:
    """A context manager; with one rank it does nothing.

    Args:
        hint: what to do next, for the line that is said when another rank is gone.
        silence_s: how long a rank may be unheard of before it counts as gone.
    """

    def __init__(
        self, parallel: Parallel, hint: Callable[[], str], silence_s: float = SILENCE_S
    ) -> None:
        self._parallel, self._hint, self._silence_s = parallel, hint, silence_s
        self._watch: RankWatch | None = None

    def __enter__(self) -> RankGuard:
        """Connect to the other ranks; a collective."""
        layout = self._parallel.layout
        if layout.world_size > 1:
            listener = RankWatch.listen() if layout.rank == 0 else None
            port = self._parallel.largest(listener.getsockname()[1] if listener is not None else 0)
            address = (layout.launch.master_host, port)
            self._watch = RankWatch(
                layout.rank,
                layout.world_size,
                address,
                self._stop,
                listener=listener,
                silence_s=self._silence_s,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say goodbye, or say why not. An error that is only another rank's end arriving as a
        broken collective waits for the news.
        """
        if self._watch is None:
            return
        if error is None:
            self._watch.close()
            return
        if isinstance(error, Exception) and not isinstance(error, SonicMoEError):
            self._watch.wait_for_news(NEWS_S)  # `_stop` ends the process
        self._watch.fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _stop(self, reason: str) -> None:
        """The main thread may be inside a collective that will never return: end the process from
        here.
        """
        rank = self._parallel.layout.rank
        sys.stderr.write(f"sonicmoe train: rank {rank} stops: {reason}; {self._hint()}\n")
        sys.stderr.flush()
        os._exit(EXIT_LOST)
