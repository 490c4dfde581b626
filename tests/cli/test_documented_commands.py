"""Commands, options and links that the guides name exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from sonicmoe.bench.shapes import SHAPES
from sonicmoe.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
GUIDES = (
    "README.md", "ernie_compat/README.md",
    *(f"docs/{name}.md" for name in (
        "design", "env", "jit", "kernels", "newcomer", "numerics", "performance", "pytorch", "transformers", "troubleshooting",
    )),
)  # fmt: skip
TEXTS = {guide: (ROOT / guide).read_text(encoding="utf-8") for guide in GUIDES}
NAME_NO_COMMAND = {"docs/pytorch.md", "docs/transformers.md"}


def code_of(text):
    """Every line of code: fenced in no language or in a shell's, indented, or between backticks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    fenced = [line for language, block in blocks if language in {"", "sh", "bash"} for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return fenced + re.findall(r"`([^`\n]+)`", prose) + re.findall(r"^    (\S.*)$", prose, flags=re.MULTILINE)


def invocations(text):
    """Every `sonicmoe command ...` in code, up to the end of the code or a comment."""
    pattern = r"(?:^|-m |=\S+ |[;|&] |do |profile )sonicmoe ((?!-)[^#;|&]+)"
    return [match.group(1) for part in code_of(text) if (match := re.search(pattern, part))]


def scripts(text):
    """`(path, options)` of every script of tools/ci that is run in code, by Python or by itself."""
    pattern = r"(?:^|[ =])(tools/ci/\w+\.(?:py|sh))((?: [^#;|&]*)?)"
    found = [match for part in code_of(text) for match in re.finditer(pattern, part)]
    return [(match.group(1), re.findall(r"--[\w-]+", match.group(2))) for match in found]


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide not in NAME_NO_COMMAND])
def test_commands_and_options_exist(guide):
    found = invocations(TEXTS[guide])
    assert found
    for invocation in found:
        name, *words = invocation.split()
        assert name in COMMANDS, invocation
        command = main.get_command(click.Context(main), name)
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert used <= options, f"{invocation}: {used - options}"


@pytest.mark.parametrize("guide", GUIDES)
def test_scripts_and_their_options_exist(guide):
    for path, used in scripts(TEXTS[guide]):
        assert (ROOT / path).exists(), path
        # A shell script hands its options on.
        program = ROOT / path if path.endswith(".py") else ROOT / "tools" / "ci" / "core_tests.py"
        known = set(re.findall(r"[\"'](--[\w-]+)[\"']", program.read_text(encoding="utf-8")))
        assert set(used) <= known | {"--help"}, f"{path}: {set(used) - known}"


def test_a_wrong_command_is_seen():
    fences = "```python\nsonicmoe not()\n```\n    python tools/ci/jit_bench.py --fast\n```\nsonicmoe bench --no  # sonicmoe x\n```\n"
    text = f"`sonicmoe trian`\n{fences}"
    assert invocations(text) == ["bench --no  ", "trian"]
    assert scripts(text) == [("tools/ci/jit_bench.py", ["--fast"])]
    assert scripts(TEXTS["docs/performance.md"]) and scripts(TEXTS["docs/jit.md"]) and scripts(TEXTS["README.md"])


@pytest.mark.parametrize("guide", GUIDES)
def test_links_and_files_exist(guide):
    text = TEXTS[guide]
    for target, anchor in re.findall(r"\]\(([\w./]+\.md)(?:#([\w-]+))?\)", text):
        linked = (ROOT / guide).parent / target
        assert linked.exists(), target
        if anchor:
            headings = {
                h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            }
            assert anchor in headings
    for path in re.findall(r"`((?:tools|tests|sonicmoe|docs|examples)/[\w/.]+\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_named_shapes_exist():
    for text in TEXTS.values():
        assert set(re.findall(r"--shape (\S+)", text)) <= set(SHAPES)
