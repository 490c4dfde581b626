"""The directory of a run: nothing in it is lost by accident."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sonicmoe.errors import ConfigError, expect

from .trainer import CAPTURED_PATTERN, CHECKPOINT_NAME, METRICS_NAME

SUMMARY_NAME = "summary.json"
# What a run leaves beside captured tensors, and so what --overwrite removes.
RUN_FILES = (CHECKPOINT_NAME, METRICS_NAME, SUMMARY_NAME, "loss.png")


def open_directory(out: Path | None, may_hold_a_run: bool) -> Path:
    """The directory of the results, `out` or a new one named by the time. ConfigError where it cannot
    be made or written, or holds a run that would be lost.
    """
    # Two runs may start in one second.
    directory = out or Path("runs", time.strftime(f"train-%Y%m%d-%H%M%S-{os.getpid()}"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be a directory: {error.strerror}") from None
    expect(os.access(directory, os.W_OK), ConfigError, f"--out {directory} is not writable")
    # A link that points nowhere counts too: its owner may bring the disk back.
    held = any(os.path.lexists(directory / name) for name in RUN_FILES)
    keeps = "--resume continues it, --overwrite replaces it, another --out keeps it"
    expect(may_hold_a_run or not held, ConfigError, f"--out {directory} holds a run; {keeps}")
    return directory


def clear(directory: Path) -> None:
    """Remove a run's files, and nothing else. ConfigError where one cannot be removed."""
    try:
        for path in (*(directory / name for name in RUN_FILES), *directory.glob(CAPTURED_PATTERN)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--overwrite cannot remove {error.filename}: {error.strerror}") from None
