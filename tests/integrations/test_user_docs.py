"""The pages and examples for users run as they are printed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import processes
import pytest
from processes import ROOT

PAGES = {"pytorch": "torch", "transformers": "transformers", "migrating": "torch"}
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def run(script: str) -> str:
    """What a script prints in a process of its own."""
    result = processes.of_checkout(script, **ONE_RANK)
    assert result.returncode == 0, result.stderr
    return result.stdout


def snippets_of(page: str) -> list[str]:
    """Every block of a page, all of which are Python."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == text.count("```") // 2
    return snippets


def is_of_paddle(snippet: str) -> bool:
    """Whether a block is a program of its own, under Paddle."""
    return snippet.startswith("import paddle\n")


def program(snippets: list[str], folder: Path) -> str:
    script = folder / "page.py"
    script.write_text("\n".join([*snippets, "print('all ran')"]), encoding="utf-8")
    return str(script)


@pytest.mark.paddle
@pytest.mark.parametrize("page", ["migrating"])
def test_every_paddle_snippet_of_a_page_is_a_program(page: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("needs paddle")
    snippets = [snippet for snippet in snippets_of(page) if is_of_paddle(snippet)]
    assert snippets
    for snippet in snippets:
        assert run(program([snippet], tmp_path)).endswith("all ran\n")


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_of_a_page_runs_after_the_one_before(page: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PAGES[page]) is None:
        pytest.skip(f"needs {PAGES[page]}")
    snippets = [snippet for snippet in snippets_of(page) if not is_of_paddle(snippet)]
    assert len(snippets) >= 4
    out = run(program(snippets, tmp_path))
    assert out.endswith("all ran\n")
    if page == "transformers":
        assert "Qwen3MoeExperts has the activation MishActivation" in out
        assert 1e-4 < float(re.search(r"relative difference of the logits: (\S+)", out)[1]) < 0.1
