"""Figures that need no screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    """A matplotlib figure and its axes as a flat list."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.9 * rows), squeeze=False, layout="constrained")
    fig.suptitle(title)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return fig, list(axes.flat)


def save_figure(fig: Any, path: Path) -> None:
    from matplotlib import pyplot

    fig.savefig(path, dpi=110)
    pyplot.close(fig)
