"""The environment of the trainers takes torch and the rest from the one below it."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest
from processes import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("pinned", [*EXTRAS["doors"], EXTRAS["dev"][1]])
def test_has_what_is_pinned(pinned):
    name, version = pinned.split("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed here; `make doors` runs this")
    assert found.split("+")[0] == version
