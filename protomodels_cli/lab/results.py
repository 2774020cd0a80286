"""Where an experiment's numbers and pictures go."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from protomodels_cli.observe.metrics import strict

Result = dict[str, Any]


def say(what: str) -> None:
    """What the experiment is doing now; on stderr, beside its results."""
    print(what, file=sys.stderr, flush=True)


def write_json(result: Result, path: Path) -> None:
    path.write_text(json.dumps(strict(result), indent=1) + "\n")


def figure(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    """A matplotlib figure that needs no screen, and its axes as a flat list."""
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
