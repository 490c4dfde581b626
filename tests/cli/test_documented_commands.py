"""Commands, options and links that the guides name exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from sonicmoe.bench.shapes import SHAPES
from sonicmoe.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("troubleshooting", "newcomer", "performance")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in GUIDES}


def invocations(text):
    """Every `sonicmoe command ...` in code, up to the end of the code or a comment."""
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (.+)$", text, flags=re.MULTILINE)
    return [match.group(1) for part in code if (match := re.search(r"\bsonicmoe ((?!-)[^#;]+)", part))]


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_and_options_exist(guide):
    found = invocations(TEXTS[guide])
    assert found
    for invocation in found:
        name, *words = invocation.split()
        assert name in COMMANDS, invocation
        command = main.get_command(click.Context(main), name)
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= options, f"{invocation}: {used - options}"


@pytest.mark.parametrize("guide", GUIDES)
def test_links_and_files_exist(guide):
    text = TEXTS[guide]
    for target, anchor in re.findall(r"\]\(([\w./]+\.md)(?:#([\w-]+))?\)", text):
        linked = ROOT / "docs" / target
        assert linked.exists(), target
        if anchor:
            headings = {
                h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            }
            assert anchor in headings
    for path in re.findall(r"`((?:tools|tests|sonicmoe|docs)/[\w/.]+\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_named_shapes_exist():
    for text in TEXTS.values():
        assert set(re.findall(r"--shape (\S+)", text)) <= set(SHAPES)
