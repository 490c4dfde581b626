"""Failures of a collective, told in one sentence: which operation, among how many ranks, what the
library saw, and where to look.

A rank that dies shows on the others as a closed connection, or as silence until the group's timeout.
Libraries report it in the words of their sockets.
"""

from __future__ import annotations

from ..errors import RankLostError, SonicMoEError

# Words of gloo, of Paddle's gloo, of NCCL and of DeepEP for a peer that is gone.
_SIGNS = (
    *("connection closed by peer", "connection reset by peer", "broken pipe"),
    *("timed out", "timeout", "gloo", "nccl", "deepep"),
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a library says that another rank does not answer."""
    if isinstance(error, SonicMoEError) or not isinstance(error, RuntimeError | OSError):
        return False
    said = str(error).lower()
    return any(sign in said for sign in _SIGNS)


def raise_lost_rank(error: Exception, doing: str, library: str, rank: int, ranks: int) -> None:
    """Raise a `RankLostError` from `error` if it says that a rank is gone; else return."""
    if not is_lost_rank(error):
        return
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Paddle's errors begin with a stack of C++ calls; the line with the sign is the news.
    reason = next((line for line in lines if any(s in line.lower() for s in _SIGNS)), lines[0])
    raise RankLostError(
        f"rank {rank} of {ranks} lost another rank in the {doing} over {library}: {reason[:300]}; "
        "that rank has died or did not answer before the group's timeout, and its own log says "
        "why. This step cannot be finished: start all ranks again from the last checkpoint"
    ) from error
