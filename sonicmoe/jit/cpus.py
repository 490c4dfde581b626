"""How many compilers a process may run at once: its CPU affinity, and the quota of its control group
(v1 and v2).

`os.cpu_count` counts the CPUs of the host, which would start far too many compilers in a container.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

AUTO, OFF = "auto", "off"
_CONTROLLER = {"cpu", "cpuacct,cpu", "cpu,cpuacct"}
# The files of a directory that have quota and period, in microseconds: of v2, and of v1.
_LIMITS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def compilers(limit: str | int = AUTO) -> int:
    """How many compilers this process runs at once; `limit`: a number of them, or "auto"."""
    if limit != AUTO:
        return int(limit)
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, math.ceil(quota() or allowed))


def quota(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """The smallest quota, in CPUs, of this process's control group and of those above it, or None."""
    found = [_limit(folder, files) for folder in _groups(membership, mount) for files in _LIMITS]
    return min((limit for limit in found if limit is not None), default=None)


def _groups(membership: Path, mount: Path) -> list[Path]:
    """The directories of this process's groups, each with those above it.

    A container may see the path that the host has for its group, below a mount that begins at that
    group. Those directories do not exist then, and the last of the list, the mount itself, does.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controllers in _CONTROLLER:
            group = Path(path.strip("/"))
            folders += [mount / controllers / above for above in (group, *group.parents)]
    return folders


def _limit(folder: Path, files: tuple[str, ...]) -> float | None:
    try:
        words = [word for name in files for word in (folder / name).read_text("utf-8").split()]
        quota_us, period_us = map(int, words)
    except (OSError, ValueError):  # absent, or "max 100000" where v2 has no limit
        return None
    # v1 says -1 where there is no limit.
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None
