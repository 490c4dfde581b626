"""What this machine has, and numbers of any size in a message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sonicmoe import host
from sonicmoe.errors import ConfigError
from sonicmoe.host import count, gibibytes, require_memory


def test_a_container_lowers_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_LIMITS", (limit, tmp_path / "none"))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.host_memory() == whole
    for text, wanted in (("max", whole), ("1048576\n", 1 << 20), ("9" * 30, whole)):
        limit.write_text(text)
        assert host.host_memory() == wanted


def test_the_refusal_names_purpose_estimate_and_what_is_there() -> None:
    require_memory(1 << 30, "a model", available=1 << 30)
    wanted = "a model needs at least 1.5 GiB of memory, and this machine has 1.0 GiB"
    with pytest.raises(ConfigError, match=wanted):
        require_memory(3 << 29, "a model", available=1 << 30)


def test_numbers_of_any_size_are_short() -> None:
    assert (count(1234), gibibytes(3 << 29)) == ("1,234", "1.5 GiB")
    assert count(10**5000) == "10^5000" and len(gibibytes(10**5000)) < 20
