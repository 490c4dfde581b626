"""Draw the pictures of README.md and docs/performance.md from the files in docs/data.

    python benchmarks/readme_chart.py

| picture | from |
|---|---|
| `model_layers_*.png`: gain by model, compiled stock is the line at 1.0 | `model_layers.json` |
| `ep_layer_*.png`: one layer over two GPUs, the experts and what is added to them | `ep_layer.json` |

Each picture is drawn twice, for a light and for a dark page. The figures drawn are stored in the
file, and tests/test_readme.py compares them with the data and the tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
EP_TOKENS = 16384  # of a GPU


@dataclass(frozen=True)
class Page:
    """The colours of a page: its background, its text, and bars that both can be told from."""

    name: str
    ground: str
    ink: str
    stock: str
    bf16: str
    fp8: str

    @property
    def colours(self) -> dict[str, str]:
        """The colours of a figure as matplotlib's settings."""
        ink = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        ground = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
        return {**dict.fromkeys(ink, self.ink), **dict.fromkeys(ground, self.ground)}


PAGES = (
    Page("light", "#ffffff", "#1f2328", "#8c959f", "#54aeff", "#2da44e"),
    Page("dark", "#0d1117", "#e6edf3", "#6e7681", "#388bfd", "#3fb950"),
)


def read(name: str) -> dict[str, Any]:
    """What was measured: card, date, command, rows."""
    return dict(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


def gains() -> dict[str, dict[str, float]]:
    """How many times as fast as compiled stock a layer is, by model and tokens, to two digits."""
    return {
        f"{row['experts']}, {row['tokens']:,}": {
            name.upper(): round(row["compiled_us"] / row[f"{name}_us"], 2)
            for name in ("bf16", "fp8")
        }
        for row in read("model_layers")["rows"]
    }


def parts() -> dict[str, dict[str, float]]:
    """Milliseconds of a layer over two GPUs, by way: the experts alone and what is added to them;
    or the whole, where the experts were not timed alone.
    """
    found = {}
    for row in read("ep_layer")["rows"]:
        whole, alone = row[f"ms_{EP_TOKENS}"], row.get(f"experts_alone_{EP_TOKENS}")
        found[row["way"]] = (
            {"whole": whole}
            if alone is None
            else {"experts": alone, "added": round(whole - alone, 2)}
        )
    return found


def draw_gains(axes: Any, page: Page) -> None:
    """Two bars a model, and the line of compiled stock."""
    height = 0.38
    for row, bars in enumerate(gains().values()):
        for offset, (name, colour) in enumerate((("BF16", page.bf16), ("FP8", page.fp8))):
            place = row + (offset - 0.5) * height
            axes.barh(place, bars[name], height, color=colour, label=None if row else name)
            axes.text(bars[name] + 0.03, place, f"{bars[name]:.2f}x", va="center", fontsize=7)
    axes.axvline(1.0, color=page.ink, linewidth=1.2, label="stock, torch.compile")
    name_rows(axes, list(gains()), "upper right")
    about = read("model_layers")
    axes.set_xlabel(
        f"speed of one layer, forward and backward, over compiled stock; {about['card']}, "
        f"{about['date']}",
        fontsize=8,
    )


def draw_parts(axes: Any, page: Page) -> None:
    """A stacked bar for each way."""
    colours = {"whole": page.stock, "experts": page.fp8, "added": page.bf16}
    labels = {
        "whole": "whole layer, a peer's",
        "experts": "our experts alone",
        "added": "exchange, waiting, rest",
    }
    told: set[str] = set()
    for row, (_, found) in enumerate(parts().items()):
        at = 0.0
        for part, ms in found.items():
            label = None if part in told else labels[part]
            axes.barh(row, ms, 0.7, left=at, color=colours[part], label=label)
            told.add(part)
            at += ms
        axes.text(at + 0.15, row, f"{at:.2f} ms", va="center", fontsize=8)
    name_rows(axes, list(parts()), "lower right")
    about = read("ep_layer")
    axes.set_xlabel(
        f"ms of one layer, forward and backward, {EP_TOKENS:,} tokens a GPU; {about['card']}s, "
        f"{about['date']}",
        fontsize=8,
    )


def name_rows(axes: Any, names: list[str], legend: str) -> None:
    """The rows from the top, and room for the figures beside the bars."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.legend(loc=legend, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, tuple[Callable[[Any, Page], None], Callable[[], Any], float]] = {
    "model_layers": (draw_gains, gains, 5.2),
    "ep_layer": (draw_parts, parts, 3.0),
}


def path_of(picture: str, page: Page) -> Path:
    """The file of a picture for a page."""
    return DATA / f"{picture}_{page.name}.png"


def draw(picture: str, page: Page) -> Path:
    """Draw one picture for one page."""
    paint, figures, height = PICTURES[picture]
    return paint_file(path_of(picture, page), page, paint, figures(), height)


def paint_file(
    path: Path, page: Page, paint: Callable[[Any, Page], None], figures: Any, height: float
) -> Path:
    """Draw a file for one page, with the figures drawn kept in it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(page.colours):
        figure = Figure(figsize=(8.4, height), layout="constrained")
        paint(figure.subplots(), page)
        figure.savefig(path, dpi=110, metadata={"Description": json.dumps(figures)})
    return path


if __name__ == "__main__":
    for name in PICTURES:
        for each in PAGES:
            print(draw(name, each))
