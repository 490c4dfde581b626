"""The scripts of examples/ do what they say, as a reader starts them, and so do the pages for users:
docs/finetuning.md on one process, and what is about several ranks on two.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from worlds import ROOT, environment, free_ports, run_world, torchrun_variables

EXAMPLES = ROOT / "examples"
IN_TURN = Path(__file__).with_name("in_turn.py")
PAGES = (
    *("docs/pytorch.md", "docs/finetuning.md", "docs/verify.md", "ernie_compat/README.md"),
    *("docs/torchtitan.md", "docs/megatron.md"),
)
# Scripts that print one error at the beginning and three later on. All others have a test below, and
# those of other trainers in tests/doors.
LEARN_A_FUNCTION = ("train_moe.py", "train_node_main_grad.py")
DDP = "train_ddp.py --steps 6"


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) for name in packages)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if not has(name)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


FOR_ADAPTERS = ("transformers", "peft")
FOR_TUNING = ("torch", "transformers", "accelerate", "peft")


def run(*lines: object, **variables: str) -> list[str]:
    """Run these scripts, each with its arguments, in one process; return the output of each."""
    result: subprocess.CompletedProcess[str] = processes.run(
        [IN_TURN, *lines], environment(**variables), ROOT, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\f")[:-1]


def figures(out: str, name: str) -> list[float]:
    """What follows `name` in each line of progress."""
    return [float(value) for value in re.findall(rf"{name} (\S+)\b", out)]


def snippets_of(page: str, of_paddle: bool = False) -> list[str]:
    """Every block of a page, all of which are Python; those of Paddle are programs of their own."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == text.count("```") // 2
    return [each for each in snippets if each.startswith("import paddle\n") == of_paddle]


def written(folder: Path, name: str, *parts: str) -> Path:
    """A script of these parts, which says when it has run to its end."""
    script = folder / f"{name}.py"
    script.write_text("\n".join([*parts, "print('all ran')"]), encoding="utf-8")
    return script


# docs/finetuning.md: a section's blocks by its heading, in the order of the page.

TUNING = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
SECTIONS = {
    heading: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for heading, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TUNING, re.M | re.S)
}
MODEL = re.findall(r"```python\n(.*?)```", TUNING.split("\n## ")[0], flags=re.DOTALL)
ON_TWO_RANKS = ("FSDP2", "Expert parallelism")

# Statements of the page that its snippets do not check.
COUNT_COPIES = """
import sys
sys.path.insert(0, "tests")
from functional.following import Following
from sonicmoe.layer.plan import Plan, _fits
following = Following()
copies, its_choice = following.events, Plan.chosen
Plan.chosen = property(lambda _: following, lambda *_: None)
"""
AFTER = {
    # Two layers, and forwards after each of two optimizer steps; the first step finds copies.
    "Accumulation and clipping": "assert len(copies) == 2 * 2, copies\n",
    "LoRA": "assert not any(p.grad is not None for k, p in merged.named_parameters() if 'lora' in k)\n",
    # Without the page's way, the experts start anew.
    "Trainer": """
begun = load(torch.float32)
with torch.no_grad():
    for parameter in begun.parameters():
        parameter.mul_(2.0)
Trainer(model=begun, args=arguments, train_dataset=examples).train(resume_from_checkpoint=saved)
pairs = {n: (p, model.get_parameter(n)) for n, p in begun.named_parameters()}
anew = [n for n, (one, other) in pairs.items() if (one - other).norm() > 0.5 * other.norm()]
assert anew and all("mlp.experts" in key for key in anew), anew
""",
    "Frozen experts": "copies.clear(); model(input_ids=batch(0)); assert len(copies) == 2\n",
    "Compared with `grouped_mm`": """
with torch.autocast(model.device.type, torch.bfloat16):
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    product = torch.nn.functional.grouped_mm(torch.ones(16, 16), torch.ones(2, 16, 16), offs=offsets)
assert product.dtype == torch.float32
assert AutoModelForCausalLM.from_config(config).config._experts_implementation == "grouped_mm"
""",
}
BEFORE = {"Accumulation and clipping": "copies.clear(); model.zero_grad()\n"}
# Every rank compares with one process that sees both ranks' batches.
ALONE = """
alone, wanted = load(torch.float32), []
for _ in range(2):
    parts = [alone(input_ids=batch(rank), labels=batch(rank)).loss for rank in range(2)]
    (sum(parts) / 2).backward()
    wanted.append((parts[int(os.environ["RANK"])].item(), torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)))
    if len(wanted) == 1:
        first = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    first.step()
    first.zero_grad()
bound = {'FSDP2': 0.02, 'Expert parallelism': 0.002}[section]
assert all(abs(found - loss) < bound * loss for found, (loss, _) in zip(losses, wanted, strict=True)), (losses, wanted)
assert abs(norm - wanted[-1][1]) < 5 * bound * norm, (norm, wanted)
"""


def of_one_process() -> Iterator[str]:
    """The page on fine-tuning, but for what is about several ranks."""
    assert len(MODEL) + sum(map(len, SECTIONS.values())) == TUNING.count("```python")
    assert all(SECTIONS[heading] for heading in (*ON_TWO_RANKS, *AFTER))
    yield from (*MODEL, COUNT_COPIES)
    for heading, blocks in SECTIONS.items():
        if heading not in ON_TWO_RANKS:
            yield from (BEFORE.get(heading, ""), *blocks, AFTER.get(heading, ""))
    yield "Plan.chosen = its_choice; _fits.clear()"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The output of each script and page of PyTorch, by its name. All run in one process, because importing
    transformers takes longer than most of them.
    """
    folder, lines = tmp_path_factory.mktemp("model"), [f"{EXAMPLES}/{n}" for n in LEARN_A_FUNCTION]
    pages = {name: snippets_of(name) for name in ("pytorch", "migrating")}
    if has(*FOR_TUNING):
        lines = [str(written(folder, "finetuning", *of_one_process())), *lines]
        lines.append(f"{EXAMPLES}/{DDP} --accumulate 4")
    if has(*FOR_ADAPTERS):
        lines.append(f"{EXAMPLES}/finetune_lora.py --steps 16")
    if has("transformers"):
        pages["transformers"] = snippets_of("transformers")
        write_tokenizer_of_bytes(folder)
        tune = f"{EXAMPLES}/finetune_transformers.py --steps 6"
        # Again in another dtype, and everything but the experts.
        more = f"--model {folder} --dtype bfloat16 --freeze-experts"
        lines += [f"{tune} --save {folder}", f"{tune} {more}"]
    # These come last: they are scripts that a launcher would have started, with a process group.
    (one_rank,) = torchrun_variables(1)
    launched = f"import os\nos.environ |= {one_rank}"
    for name, snippets in pages.items():
        assert len(snippets) >= 4
        lines.append(str(written(folder, name, launched, *snippets)))
    found: dict[str, list[str]] = {}
    for line, out in zip(lines, run(*lines, TMPDIR=str(folder)), strict=True):
        found.setdefault(Path(line.split()[0]).name, []).append(out)
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


@needs(*FOR_ADAPTERS)
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
    """Every Paddle snippet of a page is a program, too, and runs beside it."""
    snippets = snippets_of("migrating", of_paddle=True)
    pages = [written(tmp_path, f"{n}", snippet) for n, snippet in enumerate(snippets)]
    script = f"{EXAMPLES}/train_paddle.py"
    lines = f"{script} --steps 6 --save {tmp_path}", f"{script} --steps 8", *pages
    begun, whole, *shown = run(*lines)
    assert shown and all(out.endswith("all ran\n") for out in shown)
    errors = figures(whole, "error")
    assert len(errors) == 3 and errors[-1] < 0.95 * errors[0]
    # In another process, because Paddle numbers the parameters of a process.
    (continued,) = run(f"{script} --steps 8 --load {tmp_path}")
    # Steps 0 and 5 are of the first part, and step 7 is the last one of the second.
    assert begun.splitlines() + continued.splitlines() == whole.splitlines()


def test_every_example_is_linked_from_a_page() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    linked = re.findall(r"\(\.\./examples/(\w+\.py)\)", text)
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(linked)


def test_every_snippet_of_a_page_runs_after_the_one_before(printed: dict[str, list[str]]) -> None:
    pages = [name for name in printed if not (EXAMPLES / name).exists()]
    assert len(pages) >= 2
    for name in pages:
        assert printed[name][0].endswith("all ran\n"), name
    if has("transformers"):
        (out,) = printed["transformers.py"]
        assert "Qwen3MoeExperts has the activation MishActivation" in out
        assert 1e-4 < float(re.search(r"relative difference of the logits: (\S+)", out)[1]) < 0.1


@needs(*FOR_TUNING)
@pytest.mark.trained
def test_several_ranks_train_as_one_process(tmp_path: Path, printed: dict[str, list[str]]) -> None:
    """The example of DDP, the snippets of two sections, and peft's adapters on experts."""
    lines = [f"{EXAMPLES}/{DDP} --accumulate 2"]
    # Each has a port of its own: a rank may come to the next script before the last one's store ends.
    for heading, port in zip(ON_TWO_RANKS, free_ports(2), strict=True):
        own_port = f"os.environ['MASTER_PORT'] = '{port}'"
        parts = [*MODEL, own_port, *SECTIONS[heading], f"section = {heading!r}", ALONE]
        lines.append(str(written(tmp_path, f"{port}", *parts)))
    folder = {"TMPDIR": str(tmp_path)}
    variables = [{**each, **folder} for each in torchrun_variables(2)]
    adapters = f"{IN_TURN.with_name('adapters_on_ranks.py')} %s {tmp_path / 'store'}"
    # Each rank has an interpreter of its own, because forked ranks hang now and then where a model under
    # DDP goes after its process group (`forked.py`).
    outputs = run_world(lambda rank: [IN_TURN, *lines, adapters % rank], variables)
    (first, *rest), (second, *others) = (out.split("\f") for out in outputs)
    assert rest == others == ["all ran\n", "all ran\n", "equal\n", ""]
    # Without `no_sync()`, without the division or with other batches the errors would differ.
    errors = figures(first, "error")
    assert second == "" and len(errors) == 2 and errors[-1] < 0.6 * errors[0]
    # fp32 sums in another order, through five optimizer steps of products in bf16 and FP8.
    pairs = zip(errors, figures(printed["train_ddp.py"][0], "error"), strict=True)
    assert all(abs(a - b) < 0.01 * b for a, b in pairs)
