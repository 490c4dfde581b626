"""One-file checkpoints: arrays by name and a JSON header in an uncompressed `.npz`, published by
rename; and what the header says about its run.

Batches depend on (seed, step) only and the model draws no random numbers, so seed and step are the
whole random state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sonicmoe.errors import ConfigError, SonicMoEError, expect
from sonicmoe.npz import NpzError, read_npz

from .corpus import Corpus, CorpusError, load_corpus
from .model_config import RunConfig

FORMAT = 2
HEADER = "header"
SCHEDULE = ("steps", "lr", "checkpoint_every")  # settings that a resumed run may change


class CheckpointError(SonicMoEError, ValueError):
    """A checkpoint is missing, damaged, or belongs to another model."""


@dataclass(frozen=True)
class SavedRun:
    """The header of a checkpoint: optimizer steps done, the run's settings, and the text by its digest
    and its absolute paths (none: the interpreter's standard library).
    """

    step: int
    config: RunConfig
    text_sha256: str
    data: tuple[str, ...] = ()

    def require_resumable(self, config: RunConfig) -> None:
        """Check that this run can be continued as `config`; only the schedule (steps, learning
        rate, cadence) may differ. CheckpointError names the first setting that differs, its saved and
        its requested value.
        """
        had, wanted = _settings(self.config), _settings(config)
        for name, asked in wanted.items():
            # A baseline that was not asked for is the checkpoint's and has nothing to contradict.
            free = name in SCHEDULE or (name == "against" and asked is None)
            words = f"checkpoint has {name} = {had[name]!r}, this run {asked!r}"
            same = had[name] == asked or free
            expect(same, CheckpointError, f"{words}; resume with the saved value")
        steps = config.train.steps
        words = f"the checkpoint is at step {self.step}, past the {steps} steps asked for"
        expect(self.step <= steps, CheckpointError, words)

    def text(self) -> Corpus:
        """The text that it was trained on, unchanged. CorpusError or ConfigError where it is not
        there, or no longer the same.
        """
        another = "to continue on another text, give --data"
        try:
            corpus = load_corpus(self.data)
        except CorpusError as error:
            raise CorpusError(f"the text of the checkpoint is gone: {error}; {another}") from None
        where = ", ".join(self.data) or "this Python's standard library"
        words = f"the text in {where} is not the one that the checkpoint was trained on; {another}"
        expect(self.text_sha256 == corpus.sha256, ConfigError, words)
        return corpus


def _settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by its name: no two parts of a configuration share one."""
    parts = config.to_json()
    return {**parts.pop("model"), **parts.pop("train"), **parts}


def save_checkpoint(path: Path, run: SavedRun, arrays: Mapping[str, np.ndarray]) -> None:
    """Write so that `path` always holds a whole checkpoint, the old one or the new one, even after
    a power cut. CheckpointError where the directory cannot be written.
    """
    header = {
        "format": FORMAT, "step": run.step, "text_sha256": run.text_sha256, "data": list(run.data),
        "config": run.config.to_json(),
    }  # fmt: skip
    # An .npz holds arrays only, so the JSON text travels as an array of bytes.
    encoded = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    try:
        with published(path) as file:
            np.savez(file, **{HEADER: encoded, **arrays})  # type: ignore[arg-type]
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def published(path: Path) -> Iterator[IO[bytes]]:
    """A file that becomes `path` when it is whole: what is there is the old one or the new one at any
    moment.
    """
    # On the same file system, because only there a rename is atomic. One name: what a kill left
    # there is written over, and no file of this size is left behind.
    temporary = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
            # A rename may reach the disk before the data that it names.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C: a partial checkpoint can be as large as the disk
        with suppress(OSError):
            temporary.unlink()
        raise


def read_header(path: Path) -> SavedRun:
    """The header alone; reads no weight. Errors as `load_checkpoint`."""
    return load_checkpoint(path, header_only=True)[0]


def require_matching_arrays(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Check names, shapes and dtypes of saved arrays against those of the model. CheckpointError
    names the first array that is missing, unknown, or of another shape or dtype.
    """
    strange = sorted(arrays.keys() ^ wanted.keys())
    words = f"checkpoint and model differ in their arrays, first in {strange[:1]}"
    expect(not strange, CheckpointError, words)
    for name, shape in wanted.items():
        array = arrays[name]
        words = f"checkpoint array {name!r} is {array.dtype} of shape {array.shape}"
        fits = array.shape == tuple(shape) and array.dtype == np.float32
        expect(fits, CheckpointError, f"{words}; the model needs float32 of {tuple(shape)}")


def load_checkpoint(
    path: Path, header_only: bool = False
) -> tuple[SavedRun, dict[str, np.ndarray]]:
    """Header and arrays as given to `save_checkpoint`. CheckpointError where there is no checkpoint at
    `path`, it is damaged, or of an unknown format.
    """
    # Asked first, because "there is no checkpoint yet" and "it is damaged" call for other remedies.
    expect(os.path.lexists(path), CheckpointError, f"no checkpoint at {path}")
    try:
        arrays = read_npz(path, lambda names: [HEADER] if header_only else names)
        header = json.loads(arrays.pop(HEADER).tobytes())
        found = header["format"]
        words = f"it has format {found!r}; this version reads format {FORMAT}"
        expect(found == FORMAT, CheckpointError, words)
        step, config = int(header["step"]), RunConfig.from_json(header["config"])
        expect(step >= 0, CheckpointError, f"it has step {step}")
        data = tuple(map(str, header["data"]))
        return SavedRun(step, config, str(header["text_sha256"]), data), arrays
    # JSON that is nested a thousand levels deep overflows the parser's stack.
    except (SonicMoEError, NpzError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason}") from None
