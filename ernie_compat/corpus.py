"""Byte-level text as training batches: numpy only, every batch a pure function of (seed, step).

Nothing is consumed in order, so resuming a run needs the step number and no iterator state.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sonicmoe.errors import SonicMoEError, expect
from sonicmoe.log import logger

FILE_SEPARATOR = 0
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
        shortest = min(len(self.train), len(self.held_out))
        expect(
            shortest > seq_len,
            CorpusError,
            f"the text has {len(self.train)} training and {len(self.held_out)} held-out bytes; "
            f"sequence length {seq_len} needs more than {seq_len} in each: give more --data or a "
            "shorter sequence",
        )


def load_corpus(paths: Sequence[str | Path] = (), max_bytes: int = MAX_CORPUS_BYTES) -> Corpus:
    """Read files and directories (recursively, in sorted order); without `paths`, the interpreter's
    standard library.

    A file named directly is read whatever it holds. Inside a directory, hidden entries, binary
    files (a NUL byte in the first 8 KiB) and installed packages are skipped. Files are joined by
    one NUL byte. CorpusError where a path does not exist or cannot be read, or there is no text at
    all.
    """
    source = [Path(path) for path in paths]
    for path in source:
        _require_text(path)
    files = _files_below(source) if source else standard_library_files()
    pieces, num_files = _read(files, max_bytes)
    where = ", ".join(str(path) for path in source) or "the interpreter's standard library"
    expect(bool(pieces), CorpusError, f"no text in {where}: every file is empty, hidden or binary")
    # The last piece is a separator behind which no file follows.
    data = np.concatenate(pieces)[:-1]
    split = int(len(data) * (1 - HELD_OUT_SHARE))
    sha256 = hashlib.sha256(data.tobytes()).hexdigest()
    # Absolute, because a resumed run may start in another directory.
    places = tuple(os.path.abspath(path) for path in source)
    return Corpus(data[:split], data[split:], num_files, sha256, places)


def standard_library_files() -> Iterator[Path]:
    """The running interpreter's own `.py` sources, without installed packages and without its test
    suites.
    """
    root, suites = Path(sysconfig.get_paths()["stdlib"]), {"test", "tests", "idle_test"}
    for path in _walk(root):
        if path.suffix == ".py" and suites.isdisjoint(path.relative_to(root).parts):
            yield path


def _require_text(path: Path) -> None:
    """Refuse what is neither a file nor a directory: a FIFO blocks, and a device never ends."""
    try:
        with _reading(path):
            kind = path.stat().st_mode
    except CorpusError:
        expect(path.exists(), CorpusError, f"no such file or directory: {path}")
        raise
    regular = stat.S_ISREG(kind) or stat.S_ISDIR(kind)
    expect(regular, CorpusError, f"{path} is neither a file nor a directory")


def _files_below(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (file for file in _walk(path) if not (_is_empty(file) or _is_binary(file)))
        else:
            yield path


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None


def _walk(root: Path) -> Iterator[Path]:
    with _reading(root):
        entries = sorted(root.iterdir())
    for path in entries:
        if path.name.startswith(".") or path.name in SKIPPED_DIRECTORIES:
            continue
        # A link to a directory may point back above the root; files are followed, directories are
        # not.
        if path.is_dir():
            if not path.is_symlink():
                yield from _walk(path)
        elif path.is_file():
            yield path


def _is_empty(path: Path) -> bool:
    """Whether a file has no bytes, as those of /proc say of themselves: some of them never end."""
    with _reading(path):
        return path.stat().st_size == 0


def _is_binary(path: Path) -> bool:
    with _reading(path), path.open("rb") as file:
        return b"\0" in file.read(8192)


def _read(files: Iterable[Path], max_bytes: int) -> tuple[list[np.ndarray], int]:
    """uint8 pieces, each followed by the separator, and the number of files with content."""
    pieces: list[np.ndarray] = []
    total = count = 0
    separator = np.array([FILE_SEPARATOR], dtype=np.uint8)
    for path in files:
        # Such a file would leave two separators in a row.
        if _is_empty(path):
            continue
        with _reading(path):
            # One byte more than fits tells a file that passes the limit from one that just fits.
            content = np.fromfile(path, dtype=np.uint8, count=max_bytes - total + 1)
        pieces += [content[: max_bytes - total], separator]
        count += 1
        if total + content.size > max_bytes:
            logger.warning("the text passes %d bytes; reading stops inside %s", max_bytes, path)
            break
        total += content.size
    return pieces, count


def _windows(data: np.ndarray, batch_size: int, seq_len: int, key: list[int]) -> np.ndarray:
    # A generator seeded by (stream, seed, step) makes any batch without making those before it.
    starts = np.random.default_rng(key).integers(0, len(data) - seq_len, size=batch_size)
    return data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
