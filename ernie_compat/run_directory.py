"""The directory of a run: one process writes it at a time, and nothing in it is lost by accident."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sonicmoe.errors import ConfigError, SonicMoEError, expect
from sonicmoe.jit.lock import try_lock
from sonicmoe.log import logger

from .checkpoint import read_header
from .metrics import read_metrics
from .trainer import CAPTURED_PATTERN, CHECKPOINT_NAME, METRICS_NAME

DEFAULT_PARENT = Path("runs")
SUMMARY_NAME = "summary.json"
# What a run leaves beside captured tensors, and so what --overwrite removes.
RUN_FILES = (CHECKPOINT_NAME, METRICS_NAME, SUMMARY_NAME, "loss.png")


@contextmanager
def opened(out: Path | None, rank: int, may_hold_a_run: bool) -> Iterator[Path]:
    """The directory of the results, `out` or a new one named by the time, which rank 0 holds
    meanwhile. Other ranks write nothing. ConfigError where it cannot be made, is in use, or holds a
    run that would be lost.
    """
    # Two runs may start in one second.
    directory = out or DEFAULT_PARENT / time.strftime(f"train-%Y%m%d-%H%M%S-{os.getpid()}")
    # The others compute with rank 0 and never open the directory, which may be on another host.
    if rank != 0:
        yield directory
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be a directory: {error.strerror}") from None
    expect(os.access(directory, os.W_OK), ConfigError, f"--out {directory} is not writable")
    # Claimed before it is looked at, because another run could start in between.
    with claimed(directory):
        # Files that killed processes did not finish; nobody writes them now.
        for partial in directory.glob(".*.partial"):
            with suppress(OSError):
                partial.unlink()
        if not may_hold_a_run:
            require_free(directory)
        yield directory


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold the directory: no other `sonicmoe train` writes into it meanwhile. The operating system
    ends the claim of a process that dies. ConfigError where another process holds it.
    """
    try:
        held = try_lock(directory / ".lock")
        if held is None:
            words = f"--out {directory} is in use by another run"
            raise ConfigError(f"{words}; wait for its end, or give another --out")
    except OSError as error:
        # A file system without locks, which must not keep anybody from training.
        logger.warning("%s cannot be locked (%s): start one run in it at a time", directory, error)
        held = None
    try:
        yield
    finally:
        if held is not None:
            held.release()


def require_free(directory: Path) -> None:
    """Refuse to start anew where a run would be lost. ConfigError says what is there, and what
    continues, replaces or keeps it.
    """
    found = found_run(directory)
    continues = "--resume continues it, " if _has_checkpoint(directory) else ""
    keeps = f"{continues}--overwrite replaces it, another --out keeps it"
    expect(found is None, ConfigError, f"--out {directory} holds {found}; {keeps}")


def require_checkpoint(directory: Path) -> None:
    """Refuse to continue a run that left no checkpoint. ConfigError says what is there instead."""
    found = None if _has_checkpoint(directory) else found_run(directory)
    words = f"--out {directory} holds {found}, so there is nothing to resume"
    expect(found is None, ConfigError, f"{words}; --overwrite starts anew")


def found_run(directory: Path) -> str | None:
    """What a run left in the directory, in words; None where there is none."""
    name = CHECKPOINT_NAME if _has_checkpoint(directory) else METRICS_NAME
    try:
        if name == CHECKPOINT_NAME:
            saved = read_header(directory / name)
            return f"a run at step {saved.step} of {saved.config.train.steps}"
        steps = len(read_metrics(directory / name))
        return f"the metrics of {steps} steps without a checkpoint" if steps else None
    except SonicMoEError:
        return f"a {name} that cannot be read"


def clear(directory: Path) -> None:
    """Remove a run's files, and nothing else. ConfigError where one cannot be removed."""
    try:
        for path in (*(directory / name for name in RUN_FILES), *directory.glob(CAPTURED_PATTERN)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--overwrite cannot remove {error.filename}: {error.strerror}") from None


def _has_checkpoint(directory: Path) -> bool:
    # A link that points nowhere counts too: its owner may bring the disk back.
    return os.path.lexists(directory / CHECKPOINT_NAME)
