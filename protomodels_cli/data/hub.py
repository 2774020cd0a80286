"""Datasets that Hugging Face's `datasets` reads: a folder on this machine, or a name on the hub; row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protomodels_cli import installing
from protomodels_cli.data.errors import DataError, Outage, missing_package
from protomodels_cli.spec.corpus import DataSpec

REQUIREMENT = "datasets>=4"
_OLDEST = 4  # of `datasets`: the first that runs no code of a dataset


def documents(data: DataSpec, folder: Path | None, split: str) -> Iterator[str]:
    """The text column of a split, one document for every row that has text."""
    with _explained(data):
        rows = _rows(data, folder, split)
        names = rows.column_names
        if names is None:  # a stream of files that do not say what they hold
            names = list(next(iter(rows), {data.field: ""}))
        if data.field in names:
            for row in rows.select_columns([data.field]):
                if isinstance(text := row[data.field], str):
                    yield text
            return
    raise DataError(
        f"the dataset {data.dataset} has no column {data.field!r}, only {', '.join(names)}",
        "set data.field to the name of the text column",
        "column",
    )


def commit_of(data: DataSpec) -> str:
    """The commit that data.revision (or the newest) is now: what is read stays the same while it is read."""
    _datasets()
    from huggingface_hub import HfApi

    with _explained(data):
        return str(HfApi().dataset_info(str(data.dataset), revision=data.revision, timeout=30).sha)


def _rows(data: DataSpec, folder: Path | None, split: str) -> Any:
    datasets = _datasets()
    if folder is None:
        return datasets.load_dataset(data.dataset, data.config, split=split, revision=data.revision, streaming=True)
    if (folder / "dataset_dict.json").exists():  # as Dataset.save_to_disk leaves it
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "state.json").exists():
        return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(str(folder), data.config, split=split, streaming=True)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_package("data.source hf", "datasets", REQUIREMENT) from None
    if int(datasets.__version__.partition(".")[0]) < _OLDEST:
        raise DataError(
            f"data.source hf needs the package datasets {_OLDEST} or newer, and {datasets.__version__} is installed: "
            "older ones run code that a dataset brings along",
            installing.package(REQUIREMENT),
            "old_package",
        )
    return datasets


@contextmanager
def _explained(data: DataSpec) -> Iterator[None]:
    """The packages raise whatever their own packages raise; the first line says what it was."""
    try:
        yield
    except DataError:
        raise
    except Exception as e:
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise Outage(
            f"the dataset {data.dataset} cannot be read: {why}",
            "check data.dataset, data.config, data.split and data.revision, and whether this machine reaches "
            "huggingface.co (a private dataset also needs HF_TOKEN); a folder works without a network",
            "dataset",
        ) from None
