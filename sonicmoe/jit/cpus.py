"""CPUs that this process may use: its affinity, and the quota of its control group (v1 and v2).

`os.cpu_count` counts the CPUs of the host, which would start far too many compilers in a container.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CONTROLLER = {"cpu", "cpuacct,cpu", "cpu,cpuacct"}
# The files of a directory that have quota and period, in microseconds: of v2, and of v1.
_LIMITS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


@dataclass(frozen=True)
class Quota:
    """CPU time per time that a control group may use, in CPUs; `group`: which one, on this host."""

    cpus: float
    group: str


def affinity() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def quota(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Quota | None:
    """The smallest quota of this process's control group and of those above it, if there is one."""
    found = [_limit(folder, files) for folder in _groups(membership, mount) for files in _LIMITS]
    limits = [limit for limit in found if limit is not None]
    return min(limits, key=lambda limit: limit.cpus, default=None)


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
    return list(dict.fromkeys(folders))


def _limit(folder: Path, files: tuple[str, ...]) -> Quota | None:
    try:
        words = [word for name in files for word in (folder / name).read_text("utf-8").split()]
        quota_us, period_us = map(int, words)
    except (OSError, ValueError):  # absent, or "max 100000" where v2 has no limit
        return None
    if quota_us <= 0 or period_us <= 0:  # v1 says -1 where there is no limit
        return None
    # Containers all call their own group "/". The inode is the same for every process of the group.
    return Quota(quota_us / period_us, str(folder.stat().st_ino))
