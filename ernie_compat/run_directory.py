"""The directory of a run: one process writes it at a time, and nothing in it is lost by accident."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sonicmoe.errors import ConfigError, SonicMoEError, expect
from sonicmoe.jit.lock import NATIVE_ONLY
from sonicmoe.log import logger

from .metrics import DAMAGED_SUFFIX, read_metrics
from .saved_run import SavedRun
from .trainer import CAPTURED_PATTERN, CHECKPOINT_NAME, METRICS_NAME

DEFAULT_PARENT = Path("runs")
SUMMARY_NAME = "summary.json"
LOCK_NAME = ".lock"
# Everything that a run leaves, captured tensors apart, and so everything that --overwrite removes.
RUN_FILES = (CHECKPOINT_NAME, METRICS_NAME, METRICS_NAME + DAMAGED_SUFFIX, SUMMARY_NAME, "loss.png")


def make_new(parent: Path = DEFAULT_PARENT) -> Path:
    """Make a directory that did not exist, named by the time. ConfigError where none can be made
    there.
    """
    stem = time.strftime("train-%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            # Two runs may start in one second. `mkdir` gives the name to one of them.
            directory = parent / (stem if number == 1 else f"{stem}-{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                return directory
            number += 1
    except OSError as error:
        raise ConfigError(
            f"no directory for the results can be made in {parent}: {error.strerror}; give --out DIR"
        ) from None


def make(directory: Path) -> None:
    """Make the directory that was asked for, where it does not exist. ConfigError where it cannot
    be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be a directory: {error.strerror}") from None
    expect(os.access(directory, os.W_OK), ConfigError, f"--out {directory} is not writable")


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold the directory: no other `sonicmoe train` writes into it meanwhile. The operating system
    ends the claim of a process that dies. ConfigError where another process holds it.
    """
    lock: Any = FileLock(str(directory / LOCK_NAME), timeout=0, **NATIVE_ONLY)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"--out {directory} is in use by another run; wait for its end, or give another --out"
        ) from None
    except (OSError, NotImplementedError) as error:
        # A file system without locks, which must not keep anybody from training.
        logger.warning("%s cannot be locked (%s): start one run in it at a time", directory, error)
        lock = None
    try:
        _sweep(directory)
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def opened(out: Path | None, rank: int, may_hold_a_run: bool) -> Iterator[Path]:
    """The directory of the results, `out` or a new one, which rank 0 holds meanwhile. Other ranks
    write nothing. ConfigError where it cannot be made, is in use, or holds a run that would be
    lost.
    """
    # They compute with rank 0 and never open the directory, which may be on another host.
    if rank != 0:
        yield out or DEFAULT_PARENT
        return
    if out is not None:
        make(out)
    directory = out or make_new()
    # Claimed before it is looked at, because another run could start in between.
    with claimed(directory):
        if not may_hold_a_run:
            require_free(directory)
        yield directory


def found_run(directory: Path) -> str | None:
    """What a run left in the directory, in words; None where there is none."""
    checkpoint, metrics = directory / CHECKPOINT_NAME, directory / METRICS_NAME
    if _has_checkpoint(directory):
        try:
            saved = SavedRun.read(checkpoint)
        except SonicMoEError:
            return f"a {CHECKPOINT_NAME} that cannot be read"
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.stat().st_mtime))
        return f"a run at step {saved.step} of {saved.config.train.steps}, written {written}"
    if os.path.lexists(metrics):
        try:
            steps = len(read_metrics(metrics))
        except SonicMoEError:
            return f"a {METRICS_NAME} that cannot be read"
        return f"the metrics of {steps} steps without a checkpoint" if steps else None
    return None


def require_free(directory: Path) -> None:
    """Refuse to start anew where a run would be lost. ConfigError says what is there, and what
    continues, replaces or keeps it.
    """
    found = found_run(directory)
    continues = "--resume continues it, " if _has_checkpoint(directory) else ""
    expect(
        found is None,
        ConfigError,
        f"--out {directory} holds {found}; {continues}--overwrite replaces it, "
        "another --out keeps it",
    )


def require_checkpoint(directory: Path) -> None:
    """Refuse to continue a run that left no checkpoint. ConfigError says what is there instead."""
    found = None if _has_checkpoint(directory) else found_run(directory)
    expect(
        found is None,
        ConfigError,
        f"--out {directory} holds {found}, so there is nothing to resume: a run with "
        "--no-checkpoint, or one that ended before its first, leaves none; --overwrite starts anew",
    )


def _has_checkpoint(directory: Path) -> bool:
    # A link that points nowhere counts too: its owner may bring the disk back.
    return os.path.lexists(directory / CHECKPOINT_NAME)


def clear(directory: Path) -> None:
    """Remove a run's files, and nothing else. ConfigError where one cannot be removed."""
    try:
        for path in (*(directory / name for name in RUN_FILES), *directory.glob(CAPTURED_PATTERN)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--overwrite cannot remove {error.filename}: {error.strerror}") from None


def _sweep(directory: Path) -> None:
    """Remove files that killed processes did not finish; nobody writes them while this one holds
    the directory.
    """
    for partial in directory.glob(".*.partial"):
        with suppress(OSError):
            partial.unlink()
