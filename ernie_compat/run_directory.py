"""The directory of a run: nothing in it is lost by accident."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sonicmoe.errors import ConfigError, SonicMoEError, expect

from .checkpoint import read_header
from .metrics import read_metrics
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
    found = None if may_hold_a_run else found_run(directory)
    continues = "--resume continues it, " if has_checkpoint(directory) else ""
    keeps = f"{continues}--overwrite replaces it, another --out keeps it"
    expect(found is None, ConfigError, f"--out {directory} holds {found}; {keeps}")
    return directory


def require_checkpoint(directory: Path) -> None:
    """Refuse to continue a run that left no checkpoint. ConfigError says what is there instead."""
    found = None if has_checkpoint(directory) else found_run(directory)
    words = f"--out {directory} holds {found}, so there is nothing to resume"
    expect(found is None, ConfigError, f"{words}; --overwrite starts anew")


def found_run(directory: Path) -> str | None:
    """What a run left in the directory, in words; None where there is none."""
    name = CHECKPOINT_NAME if has_checkpoint(directory) else METRICS_NAME
    try:
        if name == CHECKPOINT_NAME:
            saved = read_header(directory / name)
            return f"a run at step {saved.step} of {saved.config.train.steps}"
        steps = len(read_metrics(directory / name))
        return f"the metrics of {steps} steps without a checkpoint" if steps else None
    except SonicMoEError:
        return f"a {name} that cannot be read"


def has_checkpoint(directory: Path) -> bool:
    """Whether there is one. A link that points nowhere counts too: its owner may bring the disk back."""
    return os.path.lexists(directory / CHECKPOINT_NAME)


def clear(directory: Path) -> None:
    """Remove a run's files, and nothing else. ConfigError where one cannot be removed."""
    try:
        for path in (*(directory / name for name in RUN_FILES), *directory.glob(CAPTURED_PATTERN)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--overwrite cannot remove {error.filename}: {error.strerror}") from None
