"""Draw the README's picture from the tables of docs/performance.md and docs/kernels.md.

    python benchmarks/readme_chart.py

The published tables are the only source, so the picture cannot show other figures than they do.
The figures drawn are stored in the file, and tests/test_readme.py compares them with the tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURE = DOCS / "data" / "layer_time_on_NVIDIA_H100.png"
REFERENCE = "8192, 3072, 1536, 8, 8"
SHAPES = (  # T, H, I, E, K as the table of docs/performance.md writes them
    REFERENCE,
    "8192, 3072, 1536, 32, 8",
    "8192, 4096, 4096, 8, 8",
    "32768, 4096, 1024, 128, 8",
    "16384, 2048, 768, 128, 8",
)


def figures() -> dict[str, dict[str, float]]:
    """Milliseconds of GPU time of one layer, forward and backward, by shape and by bar."""
    section = (DOCS / "performance.md").read_text(encoding="utf-8").split("## A training step")[1]
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.split("\n### ")[0].splitlines()
        if line.startswith("|")
    ]
    complete = [row for row in rows if len(row) == len(header)]  # a second table has fewer columns
    table = {row[0]: dict(zip(header, row, strict=True)) for row in complete}
    found = {
        shape: {
            "BF16": float(table[shape]["BF16 both, busy"]) / 1000,
            "FP8": float(table[shape]["FP8 both, busy"]) / 1000,
        }
        for shape in SHAPES
    }
    kernels = (DOCS / "kernels.md").read_text(encoding="utf-8")
    total = re.search(r"\*\*all six\*\* \| \*\*\d+\*\* \| \*\*(\d+)\*\*", kernels)
    assert total is not None, "docs/kernels.md has no row 'all six'"
    found[REFERENCE]["DeepGEMM"] = float(total[1]) / 1000
    return found


def label(shape: str) -> str:
    """A shape in words: `T=8192 E=8`, and the sizes of an expert below."""
    tokens, hidden, intermediate, experts, topk = shape.split(", ")
    return f"T={tokens}  E={experts}  K={topk}\nH={hidden}  I={intermediate}"


def draw(measured: dict[str, dict[str, float]], path: Path) -> None:
    """Horizontal bars, a group for each shape, with the figures drawn kept in the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    height = 0.36
    for row, bars in enumerate(measured.values()):
        for offset, (name, colour) in enumerate((("BF16", "silver"), ("FP8", "tab:green"))):
            place = row + (offset - 0.5) * height
            axes.barh(place, bars[name], height, color=colour, label=None if row else name)
            text = f"{bars[name]:.2f} ms"
            if name == "FP8":
                text += f"   {bars['BF16'] / bars['FP8']:.2f}x"
            axes.text(bars[name] + 0.2, place, text, va="center", fontsize=8)
    axes.plot(
        [measured[REFERENCE]["DeepGEMM"]] * 2,
        [-height, height],
        color="tab:red",
        label="DeepGEMM: the six GEMMs alone",
    )
    axes.set_yticks(range(len(measured)), [label(shape) for shape in measured], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel("GPU time of one MoE layer, forward and backward, ms (one NVIDIA H100)")
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Description": json.dumps(measured)})


if __name__ == "__main__":
    draw(figures(), PICTURE)
    print(PICTURE)
