"""Byte-level text as training batches: numpy only, every batch a pure function of (seed, step).

Nothing is consumed in order, so resuming a run needs the step number and no iterator state.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sonicmoe.errors import SonicMoEError, expect

FILE_SEPARATOR = b"\0"
HELD_OUT_SHARE = 0.05
MAX_CORPUS_BYTES = 1 << 30
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
TRAIN_STREAM, EVAL_STREAM = 0, 1


class CorpusError(SonicMoEError, ValueError):
    """The text to train on is missing, empty or shorter than one sequence."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes of all files, split into a training part and a held-out tail.

    train, held_out: uint8 `[N]`. `sha256` names the text, so that a resumed run can tell whether it
    changed. `paths`: where it came from, absolute; none: the interpreter's standard library.
    """

    train: np.ndarray
    held_out: np.ndarray
    num_files: int
    sha256: str = field(repr=False)
    paths: tuple[str, ...] = ()

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
        """Training tokens of `step`: int64 `[batch_size, seq_len + 1]`; columns `[:-1]` are inputs,
        `[1:]` targets.
        """
        return _windows(self.train, batch_size, seq_len, [TRAIN_STREAM, seed, step])

    def held_out_batch(self, index: int, batch_size: int, seq_len: int) -> np.ndarray:
        """Evaluation tokens, the same for every seed: int64 `[batch_size, seq_len + 1]`."""
        return _windows(self.held_out, batch_size, seq_len, [EVAL_STREAM, index])

    def require_length(self, seq_len: int) -> None:
        """Check that both parts hold at least one window. CorpusError says how much text there is
        and how much `seq_len` needs.
        """
        words = f"the text has {len(self.train)} training and {len(self.held_out)} held-out bytes"
        needed = f"sequence length {seq_len} needs more than {seq_len} in each"
        longer = min(len(self.train), len(self.held_out)) > seq_len
        expect(longer, CorpusError, f"{words}; {needed}: give more --data or a shorter sequence")


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Read files and directories (recursively, in sorted order); without `paths`, the interpreter's
    standard library without its tests.

    A file named directly is read whatever it holds. Inside a directory, hidden entries, binary
    files (a NUL byte in the first 8 KiB) and installed packages are skipped. Files are joined by
    one NUL byte. CorpusError where a path does not exist or cannot be read, where there is no text
    at all, or more than `MAX_CORPUS_BYTES`.
    """
    source = [Path(path) for path in paths]
    pieces: list[bytes] = []
    size = 0
    try:
        for path in _files_below(source) if source else standard_library_files():
            # A file of /proc says that it is empty, and reading some of them never ends.
            if not path.stat().st_size:
                continue
            content = path.read_bytes()
            if path in source or b"\0" not in content[:8192]:
                pieces.append(content)
                size += len(content)
                words = f"the text is longer than {MAX_CORPUS_BYTES} bytes, at {path}"
                expect(size <= MAX_CORPUS_BYTES, CorpusError, f"{words}; needed: less --data")
    except OSError as error:
        raise CorpusError(f"cannot read {error.filename}: {error.strerror}") from None
    where = ", ".join(map(str, source)) or "the interpreter's standard library"
    expect(bool(pieces), CorpusError, f"no text in {where}: every file is empty, hidden or binary")
    whole = FILE_SEPARATOR.join(pieces)
    data = np.frombuffer(whole, dtype=np.uint8)
    split = int(len(data) * (1 - HELD_OUT_SHARE))
    # Absolute, because a resumed run may start in another directory.
    places = tuple(os.path.abspath(path) for path in source)
    digest = hashlib.sha256(whole).hexdigest()
    return Corpus(data[:split], data[split:], len(pieces), digest, places)


def standard_library_files() -> Iterator[Path]:
    """The running interpreter's own `.py` sources, without installed packages and without its test
    suites.
    """
    root, suites = Path(sysconfig.get_paths()["stdlib"]), {"test", "tests", "idle_test"}
    for path in _walk(root):
        if path.suffix == ".py" and suites.isdisjoint(path.relative_to(root).parts):
            yield path


def _files_below(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        expect(path.exists(), CorpusError, f"no such file or directory: {path}")
        yield from _walk(path) if path.is_dir() else (path,)


def _walk(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED_DIRECTORIES:
            continue
        # A link to a directory may point back above the root; files are followed, directories are
        # not.
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _windows(data: np.ndarray, batch_size: int, seq_len: int, key: list[int]) -> np.ndarray:
    # A generator seeded by (stream, seed, step) makes any batch without making those before it.
    starts = np.random.default_rng(key).integers(0, len(data) - seq_len, size=batch_size)
    return data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
