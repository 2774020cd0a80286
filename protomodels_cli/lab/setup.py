"""What the experiments share: a small run to train, and files for their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protomodels_cli.data.prepare import prepare
from protomodels_cli.errors import UserError
from protomodels_cli.model.reference import Reference
from protomodels_cli.observe.metrics import strict
from protomodels_cli.spec import spec_from
from protomodels_cli.wire.codecs import carrier

Result = dict[str, Any]


def small_reference(steps: int, seed: int, device: str, **sections: Any) -> Reference:
    """A four-layer model on the built-in text; `sections` replace fields section by section."""
    base: dict[str, Any] = {
        "name": "lab",
        "seed": seed,
        "steps": steps,
        "stages": 4,
        "model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "context": 32},
        "subspace": {"k": 8},
        "optimizer": {"lr": 3e-3, "schedule": {"warmup_steps": min(20, steps)}},
        "batch": {"size": 8, "microbatches": 2},
        "data": {"source": "builtin", "max_bytes": 2_000_000},
        "tokenizer": {"kind": "bytes"},
        "compute": {},
    }
    for name, fields in sections.items():
        base[name] = {**base[name], **fields} if isinstance(fields, dict) else fields
    spec = spec_from(base)
    return Reference(spec, prepare(spec), carrier(spec.wire), device)


def write_json(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(strict(result), indent=1) + "\n")


def figure(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    """A matplotlib figure that needs no screen, and its axes as a flat list."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs the package matplotlib", "pip install 'pmtrain[lab]'") from None
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

    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    pyplot.close(fig)
