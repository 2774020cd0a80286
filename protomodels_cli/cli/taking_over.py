"""`pmtrain coordinator --from URL`: a run directory made from a store, for a run whose coordinator is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from protomodels_cli.cli.folders import claim
from protomodels_cli.cli.say import say
from protomodels_cli.coordinator.run_dir import RunDir, holds_a_run, open_run_dir, run_of
from protomodels_cli.coordinator.seal import KEY_VARIABLE, StoreKey
from protomodels_cli.coordinator.takeover import BEGUN, Stored, open_store, take_over
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import Address


def taken_over(
    url: str, key: StoreKey | None, run_dir: Path | None, spec: RunSpec | None, base: Path | None
) -> tuple[RunDir, tuple[Address, ...]]:
    """The run directory, and where the run's peers look for a coordinator."""
    if key is None:
        fix = f"name the run's store.key with --key FILE, or put its line into {KEY_VARIABLE}"
        raise OptionError(f"--from {url} needs the key of the run", fix, "no_key")
    stored = open_store(url, key)
    if spec is not None and spec.sha256() != stored.spec.sha256():
        fix = "leave out the spec: the store has the run's own"
        raise UserError(f"{stored.url} holds a run with another spec", fix, kind="run_dir_other_spec")
    path = run_dir or _claim(stored)
    taken = take_over(stored, path, base, say)
    return replace(open_run_dir(path, None, Path(), store_key=key), found=taken.found), taken.addresses


def _claim(stored: Stored) -> Path:
    """One below runs/, unless this very run is there already, or was begun to be fetched."""
    for folder in _below_runs(stored.spec.name):
        if (folder / BEGUN).exists() and (folder / BEGUN).read_text() == stored.identity.run:
            return folder
        if _holds(folder, stored):
            fix = f"continue with `pmtrain coordinator --resume --dir {folder}`, or name another --dir"
            raise UserError(f"{folder} holds this run already", fix, kind="run_is_here")
    return claim(None, stored.spec.name)


def _below_runs(name: str) -> Iterator[Path]:
    yield from (folder for folder in sorted(Path("runs").glob(f"{name}*")) if folder.is_dir())


def _holds(folder: Path, stored: Stored) -> bool:
    try:
        return holds_a_run(folder) and run_of(folder)[1] == stored.identity
    except UserError:  # another run's, of another format
        return False
