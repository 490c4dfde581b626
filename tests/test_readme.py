"""The README keeps its promises: its examples run, its links lead somewhere, its commands and
figures are right; every page is wrapped.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import sys
import tomllib
from pathlib import Path

import processes
import pytest
import readme_chart
from processes import ROOT
from worlds import environment

from sonicmoe.architectures import arch_name
from sonicmoe.cli.main import COMMANDS
from sonicmoe.engine.capabilities import BF16, HOPPER, HOST, RECORDS, problem

README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
ENGINES = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "docs/lab", "docs/recipes", "ernie_compat")
    for path in (ROOT / folder).glob("*.md")
)
WIDTH = 100

# The example of transformers loads a tiny model in place of the one that it names.
SMALL_MODEL = """
import sys
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
small = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4,
    num_experts_per_tok=2,
)
Qwen3MoeForCausalLM(small).save_pretrained(sys.argv[1])
"""

# What must hold after each framework's example.
HOLDS = {
    "transformers": (
        "ids = torch.arange(32)[None]\n"
        "model(input_ids=ids, labels=ids).loss.backward()\n"
        "(up,) = (p for n, p in model.named_parameters() if n.endswith('experts.gate_up_proj'))\n"
        "assert model.config._experts_implementation == 'sonicmoe_fp8'\n"
        "assert float(up.grad.abs().sum()) > 0\n"
    ),
    "paddle": (
        "for weight in (w1, w2):\n"
        "    assert weight.grad.shape == weight.shape\n"
        "    assert all(float(expert.abs().sum()) > 0 for expert in weight.grad)\n"
        "assert out.shape == x.shape and bool(paddle.isfinite(out).all())\n"
    ),
    "torch": (
        "assert all(float(p.grad.abs().sum()) > 0 for p in moe.parameters())\n"
        "assert out.shape == x.shape and bool(out.isfinite().all())\n"
        "assert not torch.equal(out, moe(x, use_fp8=True)[0])\n"  # the optimizer moved the weights
    ),
}


def examples() -> dict[str, str]:
    """The README's Python blocks, by the heading above each."""
    blocks = re.findall(r"^### (\w+)\n(?:(?!^#).)*?```python\n(.*?)```", README, re.M | re.S)
    assert len(blocks) == README.count("```python")
    return dict(blocks)


@pytest.mark.parametrize(
    ("heading", "framework"),
    [
        ("Transformers", "transformers"),
        pytest.param("Paddle", "paddle", marks=pytest.mark.paddle),
        ("PyTorch", "torch"),
    ],
)
def test_example_runs_and_trains(
    heading: str, framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    example, model = examples()[heading], '"Qwen/Qwen3-30B-A3B"'
    if framework == "transformers":
        assert example.count(model) == 1
        example = SMALL_MODEL + example.replace(model, "sys.argv[1]")
    program = f"{example}\n{HOLDS[framework]}"
    if framework != "paddle":
        monkeypatch.setattr(sys, "argv", ["example.py", str(tmp_path)])
        exec(program, {})
        return
    result = processes.run(["-c", program], environment(), ROOT, timeout=240)
    assert result.returncode == 0, result.stderr


def test_the_pages_of_the_front_door_are_short() -> None:
    """Everything else is behind links."""
    most = {"README.md": 150, "docs/performance.md": 250, "CONTRIBUTING.md": 250}
    lines = {page: len((ROOT / page).read_text(encoding="utf-8").splitlines()) for page in most}
    assert {page: count for page, count in lines.items() if count > most[page]} == {}


def test_named_commands_exist() -> None:
    listed = README.split("## Commands")[1].split("```")[1]
    assert set(re.findall(r"^sonicmoe (\w+)", listed, flags=re.MULTILINE)) == set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert named and all(f"\n{name}:" in makefile for name in named)


def text_of_png(path: Path, keyword: bytes) -> str:
    """The text stored under a keyword in a PNG: chunks are length, type, data, checksum."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 8 : at + 8 + length]
        if data[at + 4 : at + 8] == b"tEXt" and body.startswith(keyword + b"\0"):
            return body[len(keyword) + 1 :].decode("latin-1")
        at += 12 + length
    raise AssertionError(f"{path.name} has no text {keyword!r}")


@pytest.mark.parametrize("page", readme_chart.PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("name", readme_chart.PICTURES)
def test_the_pictures_show_the_figures_of_the_data(name: str, page: readme_chart.Page) -> None:
    picture, (_, figures, _) = readme_chart.path_of(name, page), readme_chart.PICTURES[name]
    assert json.loads(text_of_png(picture, b"Description")) == figures()
    assert picture.stat().st_size < 200 * 1024
    drawn = re.findall(r"[\w/]+\.png", README + PERFORMANCE)
    assert {picture.name, f"{name}_light.png"} <= {path.rpartition("/")[2] for path in drawn}


def test_the_tables_show_the_figures_of_the_data() -> None:
    table = PERFORMANCE.split("## How fast is my model?")[1].split("\n## ")[0]
    rows = readme_chart.read("model_layers")["rows"]
    for row, gain in zip(rows, readme_chart.gains().values(), strict=True):
        cells = f"{row['compiled_us']:,} | {row['bf16_us']:,} ({gain['BF16']:.2f}x) | "
        cells += f"{row['fp8_us']:,} ({gain['FP8']:.2f}x) |"
        sizes = ", ".join(map(str, row["H_I_E_K"]))
        assert f"| {row['experts']} | {row['tokens']:,} | {sizes} | {cells}" in table
    for row in readme_chart.read("ep_layer")["rows"]:
        (cells,) = re.findall(rf"^\| {re.escape(row['way'])} \|(.*)\|$", PERFORMANCE, re.M)
        times = [cell.strip() for cell in cells.split("|")]
        assert times[0] == f"{row['ms_8192']:.2f}" and times[2] == f"{row['ms_16384']:.2f}"


def test_the_first_screen_shows_the_figures_of_the_data() -> None:
    """The gains of its two layers, and of a layer over two GPUs, are those of the data."""
    screen = README.split("## ")[0]
    for model in ("Qwen3-30B-A3B, 8,192", "DeepSeek-V3 EP8, 32,768"):
        gain = readme_chart.gains()[model]
        assert f"**{gain['FP8']:.2f}x**" in screen and f"{gain['BF16']:.2f}x" in screen
    ways = {row["way"]: row["ms_16384"] for row in readme_chart.read("ep_layer")["rows"]}
    stock, ours = ways["all-to-all, compiled grouped_mm"], min(ways.values())
    assert f"{stock:.2f} ms" in screen and f"{ours:.2f} ms" in screen
    assert f"**{stock / ours:.1f}x**" in screen


# Compute capabilities as NVIDIA lists them; None is a machine without a GPU.
GPUS = {
    **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)), **dict.fromkeys(("B300", "GB300"), (10, 3)),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000"), (12, 0)), "DGX Spark": (12, 1),
    "A100": (8, 0), "L40S": (8, 9), "RTX 4090": (8, 9), "none (CPU)": None,
}  # fmt: skip


def test_every_gpu_is_said_to_have_the_engines_that_its_records_give_it() -> None:
    table = INSTALL.split("| GPU | engines |")[1].split("\n\n")[0]
    said = {}
    for row in table.splitlines()[2:]:
        gpus, engines = (cell.strip() for cell in row.split("|")[1:3])
        for gpu in gpus.split(", "):
            said[gpu] = set(re.findall(r"`(\w+)`", engines))
    assert said.pop("any other") == {"reference"}
    archs = {gpu: arch_name(capability) if capability else HOST for gpu, capability in GPUS.items()}
    assert said == {
        gpu: {name.value for name, record in RECORDS.items() if problem(record, None, arch) is None}
        for gpu, arch in archs.items()
    }


def test_we_ran_what_some_record_says_is_proven() -> None:
    """The table of what was tested names every GPU on which a record is proven, and no other."""
    table = ENGINES.split("| part | scope | tested on |")[1].split("\n\n")[0]
    cells = [row.split("|")[3].split(";")[0] for row in table.splitlines()[2:]]
    ours = {gpu for gpu in GPUS if any(re.search(rf"\b{gpu}\b", cell) for cell in cells)}
    proven = {one.capability for record in RECORDS.values() for one in record.proven}
    assert {GPUS[gpu] for gpu in ours} == proven


def test_the_requirements_are_those_of_the_project() -> None:
    needs = INSTALL.split("## What it needs")[1].split("| GPU |")[0].replace("\n  ", " ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11,<3.13" and "Python 3.11 or 3.12" in needs
    extras = project["optional-dependencies"]
    assert extras["torch"] == ["torch>=2.9"] and "PyTorch >= 2.9" in needs
    assert extras["paddle"] == ["paddlepaddle>=3.3.0,<3.4"] and "Paddle 3.3." in needs
    # An extra that Paddle on Hopper takes brings no PyTorch, and no package that requires it.
    beside_paddle = {re.split("[=>]", each)[0] for each in extras["hopper"]}
    assert beside_paddle == {HOPPER.loads_with, "nvidia-ml-py"}
    assert "sonicmoe[hopper]" in extras["cuda"] and '`pip install ".[hopper]"`' in INSTALL
    versions = dict(BF16.packages)
    assert f"quack-kernels {versions['quack-kernels']}" in needs
    assert f"CuTe DSL {versions['nvidia-cutlass-dsl']}" in needs
    sizes = f"H a multiple of {HOPPER.hidden_multiple} and I of {HOPPER.intermediate_multiple}"
    assert sizes in needs


def test_the_speed_of_a_gpu_is_the_one_that_was_measured() -> None:
    section = (ROOT / "docs" / "lab" / "layer_times.md").read_text(encoding="utf-8")
    ratios = re.findall(r"^\| \d+, \d+, \d+, \d+, \d+ \|(?:[^|]+\|){4} ([\d.]+) \|", section, re.M)
    assert f"[{min(ratios)} to {max(ratios)} times]" in INSTALL
    assert f"over {len(ratios)} shapes on an H100" in INSTALL


def too_wide(page: str) -> list[str]:
    """Lines above the width; rows of tables, indented commands and pictures may be wider."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [
        line for line in lines if len(line) > WIDTH and not line.startswith(("|", "    ", "!["))
    ]


def test_prose_is_wrapped() -> None:
    assert {page: lines for page in PAGES if (lines := too_wide(page))} == {}
