"""The text that loss.py trains on: bytes of source files, cut into windows of which each is read once.
Imported by the benchmarks beside it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

Tensor = torch.Tensor
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".h", ".hpp", ".cuh", ".cpp", ".cu")
SEPARATOR = b"\0"
HELD_OUT_STREAM, TRAIN_STREAM = 0, 1


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes of `files` different files, uint8 `[N]`, joined by a NUL; `name` tells texts apart."""

    data: np.ndarray
    files: int
    name: str

    @property
    def megabytes(self) -> float:
        return len(self.data) / 1e6


def read_text(paths: Iterable[Path] = (), most_mb: float = 400.0) -> Text:
    """Every source file below `paths` (without any: the interpreter's library and its installed
    packages), once for each content, in the order of their names.

    Raises:
        ValueError: there is no text.
    """
    places = sysconfig.get_paths()
    roots = list(paths) or [Path(places[name]) for name in ("stdlib", "purelib", "platlib")]
    seen: set[bytes] = set()
    pieces: list[bytes] = []
    left = most_mb * 1e6
    for path in _files(roots):
        content = path.read_bytes()
        key = hashlib.sha1(content).digest()
        if key in seen or not content.strip():
            continue
        seen.add(key)
        pieces.append(content[: int(left)])
        left -= len(content) + 1
        if left <= 0:
            break
    if not pieces:
        raise ValueError(f"no text of {', '.join(SUFFIXES)} below {', '.join(map(str, roots))}")
    whole = SEPARATOR.join(pieces)
    name = hashlib.sha256(whole).hexdigest()[:12]
    return Text(np.frombuffer(whole, dtype=np.uint8), len(pieces), name)


def _files(roots: Iterable[Path]) -> Iterator[Path]:
    found: set[Path] = set()
    for root in roots:
        inside = [root] if root.is_file() else sorted(root.rglob("*"))
        for path in inside:
            wanted = path.suffix in SUFFIXES or path == root
            if wanted and path not in found and path.is_file():
                found.add(path)
                yield path


class Windows:
    """A text as windows of `length` bytes that do not overlap, on a device, in a random order.

    Held-out windows are drawn from the whole text and are the same for every seed. The others are
    dealt by place: `train(first, count)` of places that do not overlap has no byte twice.
    """

    def __init__(self, text: Text, length: int, held_out: int, seed: int, device: str) -> None:
        """length: with the byte that the last position predicts."""
        count = len(text.data) // length
        if held_out >= count:
            raise ValueError(f"{held_out} windows are to be held out, and the text has {count}")
        drawn = np.random.default_rng(HELD_OUT_STREAM).permutation(count)
        dealt = np.random.default_rng([TRAIN_STREAM, seed]).permutation(drawn[held_out:])
        whole = torch.from_numpy(text.data[: count * length].copy()).to(device)
        self._windows = whole.view(count, length)
        self.held_out_ids = torch.from_numpy(drawn[:held_out]).to(device)
        self.train_ids = torch.from_numpy(dealt).to(device)

    def train(self, first: int, count: int) -> Tensor:
        """uint8 `[count, length]` of the places `first` on.

        Raises:
            ValueError: the text has fewer windows.
        """
        if first + count > len(self.train_ids):
            raise ValueError(
                f"windows {first} to {first + count} are to be trained on, and the text has "
                f"{len(self.train_ids)}: fewer steps, or more --data"
            )
        return self._windows[self.train_ids[first : first + count]]

    def held_out(self, size: int) -> Iterator[Tensor]:
        """All held-out windows in batches of `size`, which divides their number."""
        for ids in self.held_out_ids.split(size):
            yield self._windows[ids]
