"""The memory of this machine, and the refusal of sizes that cannot fit into it. Standard library
only.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError, expect

# The limits of a container, of control groups version 2 and 1.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory() -> int:
    """Bytes that this process may use at most: those of the machine, or of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found)


def require_memory(needed: int, purpose: str, available: int | None = None) -> None:
    """Refuse what cannot fit, before anything is allocated.

    Args:
        needed: a lower bound in bytes, so that nothing is refused that could run.
        purpose: what needs it.
        available: bytes; default: `host_memory()`.

    Raises:
        ConfigError: naming the purpose, the estimate and what is there.
    """
    there = host_memory() if available is None else available
    expect(
        needed <= there,
        ConfigError,
        f"{purpose} needs at least {gibibytes(needed)} of memory, and this machine has "
        f"{gibibytes(there)}; needed: smaller sizes",
    )


def gibibytes(size: int) -> str:
    """`12.5 GiB`, of whatever size."""
    # In integers: a size that somebody typed may be too large for a floating-point number.
    tenths = size * 10 >> 30
    return (
        f"{count(tenths // 10)}.{tenths % 10} GiB"
        if tenths < 10**6
        else f"{count(tenths // 10)} GiB"
    )


def count(number: int) -> str:
    """`1,234`; a power of ten where the number would fill the line."""
    # Powers of two give the digits: Python refuses to print integers of thousands of digits.
    if number < 10**15:
        return f"{number:,}"
    return f"10^{int(number.bit_length() * 0.30103)}"
