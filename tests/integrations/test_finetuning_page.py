"""docs/finetuning.md runs as it is printed: on one process, and what is about several ranks on two."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import processes
import pytest
from test_examples import figures
from worlds import ROOT, environment, free_ports, run_world, torchrun_variables

PAGE = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
# A section's blocks by its heading, in the order of the page.
SECTIONS = {
    heading: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for heading, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
IN_TURN = Path(__file__).with_name("in_turn.py")
DDP = ROOT / "examples" / "train_ddp.py --steps 6"
MODEL = re.findall(r"```python\n(.*?)```", PAGE.split("\n## ")[0], flags=re.DOTALL)
ON_TWO_RANKS = ("FSDP2", "Expert parallelism")
NEEDED = ("torch", "transformers", "accelerate", "peft")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.trained,
]

# What the page says beside its snippets.
COUNT_COPIES = """
import sys
sys.path.insert(0, "tests")
from functional.following import Following
from sonicmoe.layer.plan import Plan
following = Following()
copies, chosen = following.events, Plan.chosen
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
print("as one process")
"""


def test_every_snippet_is_run() -> None:
    assert len(MODEL) == 1
    assert len(MODEL) + sum(map(len, SECTIONS.values())) == PAGE.count("```python")
    assert PAGE.count("```") == 2 * PAGE.count("```python")
    assert all(SECTIONS[heading] for heading in (*ON_TWO_RANKS, *AFTER))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process prints: of the snippets that need no more, and of DDP's example."""
    folder = tmp_path_factory.mktemp("alone")
    parts = [*MODEL, COUNT_COPIES]
    for heading, blocks in SECTIONS.items():
        if heading not in ON_TWO_RANKS:
            parts += [BEFORE.get(heading, ""), *blocks, AFTER.get(heading, "")]
    script = folder / "page.py"
    parts.append("Plan.chosen = chosen\nprint('all ran')")
    script.write_text("\n".join(parts), encoding="utf-8")
    command = [IN_TURN, script, f"{DDP} --accumulate 4"]
    result = processes.run(command, environment(TMPDIR=str(folder)), ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\f")


def test_the_snippets_of_one_process_run_in_order(alone: list[str]) -> None:
    assert alone[0].endswith("all ran\n")


def test_several_ranks_train_as_one_process(tmp_path: Path, alone: list[str]) -> None:
    """The example of DDP, the snippets of two sections, and peft's adapters on experts."""
    lines = [f"{DDP} --accumulate 2"]
    # Each has a port of its own: a rank may come to the next script before the last one's store ends.
    for heading, port in zip(ON_TWO_RANKS, free_ports(2), strict=True):
        script = tmp_path / f"{port}.py"
        own_port = f"os.environ['MASTER_PORT'] = '{port}'"
        parts = [*MODEL, own_port, *SECTIONS[heading], f"section = {heading!r}", ALONE]
        script.write_text("\n".join(parts), encoding="utf-8")
        lines.append(str(script))
    folder = {"TMPDIR": str(tmp_path)}
    variables = [{**each, **folder} for each in torchrun_variables(2)]
    adapters = f"{IN_TURN.with_name('adapters_on_ranks.py')} %s {tmp_path / 'store'}"
    # Each rank has an interpreter of its own, because forked ranks hang now and then where a model under
    # DDP goes after its process group (`forked.py`).
    outputs = run_world(lambda rank: [IN_TURN, *lines, adapters % rank], variables)
    (first, *rest), (second, *others) = (out.split("\f") for out in outputs)
    assert rest == others == ["as one process\n", "as one process\n", "equal\n", ""]
    # Without `no_sync()`, without the division or with other batches the errors would differ.
    errors = figures(first, "error")
    assert second == "" and len(errors) == 2 and errors[-1] < 0.6 * errors[0]
    # fp32 sums in another order, through five optimizer steps of products in bf16 and FP8.
    pairs = zip(errors, figures(alone[1], "error"), strict=True)
    assert all(abs(a - b) < 0.01 * b for a, b in pairs)


def section_of(beginning: str) -> str:
    return next(part for part in PAGE.split("\n## ") if part.startswith(beginning))


def test_the_table_of_memory_adds_up() -> None:
    rows = re.findall(
        r"^\| ([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|$", section_of("Memory"), re.M
    )
    *parts, total = [row for row in rows if re.search(r"\d", row[1])]
    for column in (1, 2, 3, 4):
        for choice in (0, -1):
            found = [float(row[column].split(";")[choice]) for row in parts]
            assert sum(found) == float(total[column].split(";")[choice])
    # 48 layers of 128 experts with three matrices 2048 x 768.
    experts = 48 * 128 * 3 * 2048 * 768
    assert round(experts / 1e9, 1) == 29.0
    rank, adapters = 16, 48 * 128 * 16 * (2 * 2048 + 3 * 768)
    words = f"{adapters / experts:.1%} at r = {rank}".replace("%", " %")
    stated = section_of("Memory").replace("\n", " ")
    assert (
        f"{words} for Qwen3-30B-A3B: {round(adapters / 1e6)} M parameters, {round(16 * adapters / 1e9)} GB"
        in stated
    )
    for column in (1, 2, 3, 4):
        gigabytes = round(float(total[column].split(";")[0]) * 29.0)
        assert f"{gigabytes} GB" in section_of("Memory").replace("\n", " ")
