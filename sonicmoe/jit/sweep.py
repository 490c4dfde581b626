"""Removing the private directories that killed builds left behind.

The next builder of a key removes those of its key. Keys that nobody builds again, because the
sources or a version changed since, would leave theirs for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import Timeout

from ..log import logger
from .files import StoreFiles
from .lock import file_lock, release
from .place import Place

# Longer than a build may take, so that a live builder is left alone also where a file system keeps
# the locks of each host apart.
ABANDONED_AFTER_S = 24 * 3600.0
_LOCK_OF = re.compile(r"([a-z][a-z0-9_]*-[0-9a-f]{20}-[0-9a-f]{12})\.")


def sweep_abandoned(files: StoreFiles, fresh: Place, locks: Place) -> None:
    """Remove the directories beside `fresh` that are a day older and whose lock nobody holds.

    `fresh` was made a moment ago, so its time is the file system's own clock, and the clocks of
    hosts do not matter. A wrong time only keeps a directory, or removes one whose lock is free.
    """
    try:
        old = [name for name in files.names(fresh.parent) if _age(fresh, name) > ABANDONED_AFTER_S]
        for name in old:
            owner = _LOCK_OF.match(name)
            if owner is None:
                continue
            with _free(locks, owner[1]) as free:
                if free:
                    logger.info("removing %s, which a killed build left", fresh.parent / name)
                    files.remove_tree(fresh.parent / name)
    # Tidying up is no reason to fail a build.
    except (OSError, NotImplementedError) as error:
        logger.info("%s was not swept: %s", fresh.parent, error)


def _age(fresh: Place, name: str) -> float:
    with fresh.parent.opened() as folder:
        ours, theirs = (
            os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mtime
            for entry in (fresh.name, name)
        )
    return ours - theirs


@contextmanager
def _free(locks: Place, name: str) -> Iterator[bool]:
    """Whether nobody holds a lock; it is held meanwhile."""
    lock = file_lock(locks, name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        release(lock, name)
