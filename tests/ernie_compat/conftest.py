"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import write_text

from ernie_compat.corpus import Corpus, load_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def corpus(text: Path) -> Corpus:
    return load_corpus([text])


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors gain nothing from threads, and parallel test workers would take turns at
    barriers.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
