"""Byte-level text: what is read, what is refused, batches as a function of (seed, step)."""

from __future__ import annotations

import numpy as np
import pytest

from ernie_compat import corpus as module
from ernie_compat.corpus import FILE_SEPARATOR, CorpusError, load_corpus


def test_directory_is_read_in_order_without_hidden_binary_empty_and_installed_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second" * 20)
    (tmp_path / "a.txt").write_bytes(b"first" * 20)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "site-packages").mkdir()
    for name in (".hidden/x", "site-packages/y", ".z"):
        (tmp_path / name).write_text("never")
    (tmp_path / "image.bin").write_bytes(b"\x00\x01never")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    corpus = load_corpus([tmp_path])
    assert corpus.num_files == 2
    text = np.concatenate([corpus.train, corpus.held_out]).tobytes()
    assert text == b"first" * 20 + FILE_SEPARATOR + b"second" * 20


def test_batches_depend_on_seed_and_step_only(corpus):
    batch = corpus.batch(step=7, batch_size=5, seq_len=16, seed=3)
    assert batch.shape == (5, 17) and batch.dtype == np.int64
    corpus.batch(step=8, batch_size=5, seq_len=16, seed=3)
    assert np.array_equal(batch, corpus.batch(step=7, batch_size=5, seq_len=16, seed=3))
    assert not np.array_equal(batch, corpus.batch(step=8, batch_size=5, seq_len=16, seed=3))
    assert not np.array_equal(batch, corpus.batch(step=7, batch_size=5, seq_len=16, seed=4))


def test_batches_are_windows_of_their_own_part(corpus):
    training, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    for row in corpus.batch(step=1, batch_size=20, seq_len=30, seed=0):
        assert bytes(row.tolist()) in training
    for row in corpus.held_out_batch(0, batch_size=20, seq_len=30):
        assert bytes(row.tolist()) in held_out


def test_more_text_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CORPUS_BYTES", 100)
    for name in "ab":
        (tmp_path / name).write_text(60 * name)
    with pytest.raises(CorpusError, match=r"longer than 100 bytes, at .*/b; needed: less --data"):
        load_corpus([tmp_path])


def test_files_of_proc_are_empty_as_they_say_because_reading_some_never_ends():
    with pytest.raises(CorpusError, match="no text in /proc/self/status"):
        load_corpus(["/proc/self/status"])


def test_a_window_and_its_last_target_must_fit():
    """So as many bytes as the sequence is long are one too few."""
    corpus = load_corpus()
    shorter = min(len(corpus.train), len(corpus.held_out))
    corpus.require_length(shorter - 1)
    with pytest.raises(CorpusError, match=f"needs more than {shorter} in each"):
        corpus.require_length(shorter)
