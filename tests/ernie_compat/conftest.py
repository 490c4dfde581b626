"""Fixtures of the training tests. They leave the text as it is."""

from __future__ import annotations

import pytest
from small_run import write_text

from ernie_compat.corpus import load_corpus


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def corpus(text):
    return load_corpus([text])
