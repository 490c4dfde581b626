"""What the stubs of `paddlefleet_ops` take for this machine. Fleet asks Paddle and Python; here a
test says it, because the answers of a CPU build would end every path at its first question.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The four facts on which Fleet's availability of Sonic rests."""

    capability: tuple[int, int]
    cuda: tuple[int, int] = (12, 9)
    python: tuple[int, int] = (3, 12)
    cuda_build: bool = True

    def why_not(self) -> list[str]:
        """The conditions of Fleet's own Sonic that do not hold."""
        reasons = []
        if not self.cuda_build:
            reasons.append("Paddle has no CUDA")
        if self.python < (3, 12):
            reasons.append("Python 3.12 is needed")
        if self.cuda < (12, 9):
            reasons.append("CUDA 12.9 is needed")
        if self.capability[0] < 10:
            reasons.append(f"capability 10.0 (Blackwell) is needed, found {self.capability}")
        return reasons


HOPPER = Machine((9, 0))
BLACKWELL = Machine((10, 0))

current = HOPPER
