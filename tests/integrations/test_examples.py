"""The scripts of examples/ do what they say, as a reader starts them, and so do the pages for users."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import processes
import pytest
from worlds import ROOT, environment, torchrun_variables

EXAMPLES = ROOT / "examples"
IN_TURN = Path(__file__).with_name("in_turn.py")
PAGES = (
    *("docs/pytorch.md", "docs/finetuning.md", "docs/verify.md", "ernie_compat/README.md"),
    *("docs/torchtitan.md", "docs/megatron.md"),
)
# Scripts that print one error at the beginning and three later on. All others have a test below,
# train_ddp.py in test_finetuning_page.py, and those of other trainers in tests/doors.
LEARN_A_FUNCTION = ("train_moe.py", "train_node_main_grad.py")
# Of what the example of adapters needs.
MISSING = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]


def run(*lines: str) -> list[str]:
    """What each of these examples prints, with its arguments; they run in one process."""
    command = [str(IN_TURN), *(f"{EXAMPLES}/{line}" for line in lines)]
    result: subprocess.CompletedProcess[str] = processes.run(
        command, environment(), ROOT, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\f")[:-1]


def figures(out: str, name: str) -> list[float]:
    """What follows `name` in each line of progress."""
    return [float(value) for value in re.findall(rf"{name} (\S+)\b", out)]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each script of PyTorch prints, all in one process, by its name."""
    lines, folder = [*LEARN_A_FUNCTION], tmp_path_factory.mktemp("model")
    if not MISSING:
        lines.append("finetune_lora.py --steps 16")
    if importlib.util.find_spec("transformers"):
        write_tokenizer_of_bytes(folder)
        tune = "finetune_transformers.py --steps 6"
        # Again in another dtype, and everything but the experts.
        more = f"--model {folder} --dtype bfloat16 --freeze-experts"
        lines += [f"{tune} --save {folder}", f"{tune} {more}"]
    found: dict[str, list[str]] = {}
    for line, out in zip(lines, run(*lines), strict=True):
        found.setdefault(line.split()[0], []).append(out)
    return found


@pytest.mark.trained
@pytest.mark.parametrize("script", LEARN_A_FUNCTION)
def test_a_layer_learns(script: str, printed: dict[str, list[str]]) -> None:
    (out,) = printed[script]
    errors = figures(out, "error")
    # Over 4 seeds and two instruction sets: 0.37 to 0.40 of the first, each at least 10 % lower.
    assert len(errors) == 4 and errors[-1] < 0.5 * errors[0]
    assert errors == sorted(errors, reverse=True)


@needs("transformers")
@pytest.mark.trained
def test_a_language_model_is_fine_tuned_saved_and_tuned_again(
    printed: dict[str, list[str]],
) -> None:
    losses, again = (figures(out, "loss") for out in printed["finetune_transformers.py"])
    # 5.5 is the logarithm of 256 bytes; letters of English and Python alone bring it below 4.
    assert len(losses) == 2 and abs(losses[0] - 5.545) < 0.1 and losses[-1] < 4.2
    assert len(again) == 2 and max(again) < 4.2


def write_tokenizer_of_bytes(folder: Path) -> None:
    """What a real checkpoint has beside its weights: here the id of a character is its byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(byte): byte for byte in range(33, 127)} | {"Ġ": 32, "Ċ": 10}
    free = [number for number in range(256) if number not in vocabulary.values()]
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary))
    vocabulary |= dict(zip(rest, free, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.trained
def test_an_adapter_is_trained_and_loaded_by_peft_alone(printed: dict[str, list[str]]) -> None:
    """The script itself asserts that the second process has loaded nothing of this package."""
    (out,) = printed["finetune_lora.py"]
    *steps, here, alone = figures(out, "loss")
    assert abs(steps[0] - 5.545) < 0.1 and steps[-1] < 5.1
    # FP8 and bf16 beside fp32: an adapter that was ignored would be 0.4 away.
    assert abs(here - alone) < 0.02
    assert re.search(r"129,024 of [\d,]+ parameters train", out)


@needs("paddle")
@pytest.mark.paddle
@pytest.mark.trained
def test_paddle_trains_and_a_saved_run_continues(tmp_path: Path) -> None:
    begun, whole = run(f"train_paddle.py --steps 6 --save {tmp_path}", "train_paddle.py --steps 8")
    errors = figures(whole, "error")
    assert len(errors) == 3 and errors[-1] < 0.95 * errors[0]
    # In another process, because Paddle numbers the parameters of a process.
    (continued,) = run(f"train_paddle.py --steps 8 --load {tmp_path}")
    # Steps 0 and 5 are of the first part, and step 7 is the last one of the second.
    assert begun.splitlines() + continued.splitlines() == whole.splitlines()


def test_every_example_is_linked_from_a_page() -> None:
    linked = {
        name
        for page in PAGES
        for name in re.findall(
            r"\(\.\./examples/(\w+\.py)\)", (ROOT / page).read_text(encoding="utf-8")
        )
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == linked


# Pages, as they are printed


def snippets_of(page: str, of_paddle: bool = False) -> list[str]:
    """Every block of a page, all of which are Python; those of Paddle are programs of their own."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == text.count("```") // 2
    return [each for each in snippets if each.startswith("import paddle\n") == of_paddle]


def printed_by(pages: dict[str, list[str]], folder: Path) -> list[str]:
    """What the snippets of each page print one after the other, in one process for all pages that a
    launcher would have started.
    """
    scripts = [folder / f"{page}.py" for page in pages]
    for script, snippets in zip(scripts, pages.values(), strict=True):
        script.write_text("\n".join([*snippets, "print('all ran')"]), encoding="utf-8")
    (one_rank,) = torchrun_variables(1)
    result = processes.of_checkout(IN_TURN, *scripts, **one_rank)
    assert result.returncode == 0, result.stderr
    *found, rest = result.stdout.split("\f")
    assert rest == "" and all(out.endswith("all ran\n") for out in found)
    return found


@needs("paddle")
@pytest.mark.paddle
def test_every_paddle_snippet_of_a_page_is_a_program(tmp_path: Path) -> None:
    snippets = snippets_of("migrating", of_paddle=True)
    assert snippets
    for snippet in snippets:
        printed_by({"snippet": [snippet]}, tmp_path)


def test_every_snippet_of_a_page_runs_after_the_one_before(tmp_path: Path) -> None:
    needed = {"pytorch": (), "migrating": (), "transformers": ("transformers",)}
    pages = [page for page, names in needed.items() if all(map(importlib.util.find_spec, names))]
    snippets = {page: snippets_of(page) for page in pages}
    assert all(len(each) >= 4 for each in snippets.values())
    found = dict(zip(pages, printed_by(snippets, tmp_path), strict=True))
    if "transformers" in found:
        out = found["transformers"]
        assert "Qwen3MoeExperts has the activation MishActivation" in out
        assert 1e-4 < float(re.search(r"relative difference of the logits: (\S+)", out)[1]) < 0.1
