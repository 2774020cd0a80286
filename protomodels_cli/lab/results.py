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
