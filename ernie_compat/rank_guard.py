"""Guards a run of several ranks: it tells the others of a failure here, and ends this process after
a failure there, with one line each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from sonicmoe.errors import RankLostError, SonicMoEError

from .liveness import SILENCE_S, RankWatch
from .parallel import Parallel

EXIT_LOST = 1
NEWS_S = 10.0


class RankGuard:
    """A context manager; with one rank it does nothing.

    Args:
        hint: advice for the line that this process prints when another rank is gone.
        silence_s: seconds without a heartbeat after which a rank counts as gone.
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
            # Rank 0 took a free port and tells it by a collective: the others contribute 0, so the
            # largest number is the port.
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
        """Say goodbye, or report this rank's failure.

        When another rank dies, its end may arrive here as a broken collective. Reporting that as a
        failure of this rank would hide the cause, so a lost rank and an error that is not one of
        this package first wait for the news.
        """
        if self._watch is None:
            return
        if error is None:
            self._watch.close()
            return
        own = isinstance(error, SonicMoEError) and not isinstance(error, RankLostError)
        if isinstance(error, Exception) and not own and self._watch.wait_for_news(NEWS_S):
            # `_stop` prints its line and ends the process on the watching thread. This thread would
            # go on to print the error, and may be the faster one.
            time.sleep(NEWS_S)
        self._watch.fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _stop(self, reason: str) -> None:
        """End the process from the watching thread, because the main thread may be inside a
        collective that will never return.
        """
        rank = self._parallel.layout.rank
        sys.stderr.write(f"sonicmoe train: rank {rank} stops: {reason}; {self._hint()}\n")
        sys.stderr.flush()
        # Not sys.exit, which would raise in this thread only and leave the main thread where it is.
        os._exit(EXIT_LOST)
