"""`sonicmoe bench --model` on a GPU: three ways run, and the answer ends in a sentence."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sonicmoe.cli.main import main

pytestmark = pytest.mark.gpu


def test_the_command_times_three_ways():
    sizes = ["--H", "256", "--I", "256", "--E", "8", "--K", "2"]
    result = CliRunner().invoke(main, ["bench", "--tokens", "512", *sizes, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["measured"] and found["advice"].endswith(".")
    assert [way["refusal"] for way in found["ways"]] == [None, None, None]
    assert all(way["memory_mib"] > 0 for way in found["ways"])
