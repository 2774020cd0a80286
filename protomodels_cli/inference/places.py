"""Whether a place has a model at all, looked at before torch is imported."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.errors import UserError
from protomodels_cli.export.runs import run_at
from protomodels_cli.inference.folder import FolderError, is_checkpoint


def check_model(place: str) -> None:
    """Raises UserError where it is neither a run nor a folder with a model."""
    if is_checkpoint(Path(place)):
        return
    try:
        run_at(place)
    except UserError as e:
        if e.kind != "not_a_run_dir":
            raise
        raise FolderError(
            f"{place} is neither a run directory nor a folder with a model (config.json is not there)",
            "name a run directory, or a folder that `pmtrain export` has written",
            "no_model",
        ) from None
