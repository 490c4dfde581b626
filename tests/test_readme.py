"""The README keeps its promises: its examples run, its links lead somewhere, its commands and
figures are right; every page is wrapped.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import tomllib
from pathlib import Path

import processes
import pytest
import readme_chart
from worlds import environment

from sonicmoe.architectures import arch_name
from sonicmoe.cli.main import COMMANDS
from sonicmoe.engine.capabilities import BF16, HOPPER, HOST, RECORDS, problem

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (ROOT, ROOT / "docs", ROOT / "ernie_compat")
    for path in folder.glob("*.md")
)
WIDTH = 100

# What must hold after each framework's example.
HOLDS = {
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
    [pytest.param("Paddle", "paddle", marks=pytest.mark.paddle), ("PyTorch", "torch")],
)
def test_example_runs_and_trains_every_expert(heading: str, framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    program = f"{examples()[heading]}\n{HOLDS[framework]}print('trained')\n"
    result = processes.run(["-c", program], environment(), ROOT, timeout=240)
    assert result.stdout.endswith("trained\n"), result.stderr


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


def test_the_picture_shows_the_figures_of_the_pages() -> None:
    picture = readme_chart.PICTURE
    assert f"]({picture.relative_to(ROOT)})" in README
    assert json.loads(text_of_png(picture, b"Description")) == readme_chart.figures()
    assert picture.stat().st_size < 200 * 1024


def test_the_table_shows_the_figures_of_the_pages() -> None:
    bars = readme_chart.figures()[readme_chart.REFERENCE]
    row = f"| {bars['FP8']:.2f} ms | {bars['BF16']:.2f} ms in BF16: **{bars['BF16'] / bars['FP8']:.2f}x** |"
    assert row in README
    assert f"{bars['DeepGEMM']:.2f} ms for DeepGEMM's six bare GEMMs" in README


# Compute capabilities as NVIDIA lists them; None is a machine without a GPU.
GPUS = {
    **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)), **dict.fromkeys(("B300", "GB300"), (10, 3)),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000"), (12, 0)), "DGX Spark": (12, 1),
    "A100": (8, 0), "L40S": (8, 9), "RTX 4090": (8, 9), "none (CPU)": None,
}  # fmt: skip


def test_every_gpu_is_said_to_have_the_engines_that_its_records_give_it() -> None:
    table = README.split("| GPU | engines |")[1].split("\n\n")[0]
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
    table = README.split("| part | scope | tested on |")[1].split("\n\n")[0]
    cells = [row.split("|")[3].split(";")[0] for row in table.splitlines()[2:]]
    ours = {gpu for gpu in GPUS if any(re.search(rf"\b{gpu}\b", cell) for cell in cells)}
    proven = {one.capability for record in RECORDS.values() for one in record.proven}
    assert {GPUS[gpu] for gpu in ours} == proven


def test_the_requirements_are_those_of_the_project() -> None:
    needs = README.split("## What it needs")[1].split("| GPU |")[0].replace("\n  ", " ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11,<3.13" and "Python 3.11 or 3.12" in needs
    extras = project["optional-dependencies"]
    assert extras["torch"] == ["torch>=2.9"] and "PyTorch >= 2.9" in needs
    assert extras["paddle"] == ["paddlepaddle>=3.3.0,<3.4"] and "Paddle 3.3." in needs
    # An extra that Paddle on Hopper takes brings no PyTorch, and no package that requires it.
    beside_paddle = {re.split("[=>]", each)[0] for each in extras["hopper"]}
    assert beside_paddle == {HOPPER.loads_with, "nvidia-ml-py"}
    assert "sonicmoe[hopper]" in extras["cuda"] and '`pip install ".[hopper]"`' in README
    versions = dict(BF16.packages)
    assert f"quack-kernels {versions['quack-kernels']}" in needs
    assert f"CuTe DSL {versions['nvidia-cutlass-dsl']}" in needs
    sizes = f"H a multiple of {HOPPER.hidden_multiple} and I of {HOPPER.intermediate_multiple}"
    assert sizes in needs


def test_the_speed_of_a_gpu_is_the_one_that_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.split("## A training step")[1].split("\n### ")[0]
    ratios = re.findall(r"^\| \d+, \d+, \d+, \d+, \d+ \|(?:[^|]+\|){4} ([\d.]+) \|", section, re.M)
    assert f"[{min(ratios)} to {max(ratios)} times]" in README
    assert f"over {len(ratios)} shapes on an H100" in README


def too_wide(page: str) -> list[str]:
    """Lines above the width; rows of tables, indented commands and pictures may be wider."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [
        line for line in lines if len(line) > WIDTH and not line.startswith(("|", "    ", "!["))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page: str) -> None:
    assert too_wide(page) == []
