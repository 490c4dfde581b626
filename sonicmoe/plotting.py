"""Figures drawn off screen with matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import SonicMoEError, writing

DPI = 130


class PlotsUnavailableError(SonicMoEError, ImportError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise PlotsUnavailableError, with the remedy, unless matplotlib can be imported."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        raise PlotsUnavailableError(
            "no plots were drawn: matplotlib is not installed (pip install 'sonicmoe[plots]')"
        ) from None


def new_figure(size: tuple[float, float]) -> Any:
    """A bare figure on the Agg canvas, which leaves pyplot's global state and the user's backend
    alone. PlotsUnavailableError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write the file, and its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=DPI)
    return path
