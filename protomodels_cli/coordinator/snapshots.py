"""Snapshots at the coordinator: parts come in one by one, and count once all of them are whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from protomodels_cli.files import sync_folder, write_whole


class Snapshots:
    def __init__(self, folder: Path, lineage: int, keep: int):
        self._folder, self._lineage, self._keep = folder, lineage, keep
        self._parts: dict[int, dict[int, str]] = {}  # step → stage → hash
        folder.mkdir(exist_ok=True)

    def _name(self, step: int) -> str:
        return f"{self._lineage:04d}-{step:08d}"

    def part(self, step: int, stage: int) -> Path:
        """Where a part is written while the snapshot is not complete."""
        work = self._folder / f".{self._name(step)}.partial"
        work.mkdir(exist_ok=True)
        return work / f"stage-{stage}.safetensors"

    def arrived(self, step: int, stage: int, sha256: str) -> None:
        self._parts.setdefault(step, {})[stage] = sha256

    def drop(self, step: int) -> None:
        self._parts.pop(step, None)
        shutil.rmtree(self._folder / f".{self._name(step)}.partial", ignore_errors=True)

    def has(self, step: int, stage: int) -> bool:
        return stage in self._parts.get(step, {})

    def complete(self, step: int, stages: int) -> Path:
        """All parts are here: give the snapshot its name, and let go of the oldest."""
        parts = self._parts.pop(step, {})
        if absent := [i for i in range(stages) if i not in parts]:
            raise OSError(f"stage {absent[0]} handed nothing in")
        work, final = self._folder / f".{self._name(step)}.partial", self._folder / self._name(step)
        hashes = {f"stage-{stage}.safetensors": sha256 for stage, sha256 in sorted(parts.items())}
        write_whole(work / "hashes.json", json.dumps({"step": step, "sha256": hashes}, indent=1).encode())
        os.rename(work, final)
        sync_folder(self._folder)
        whole = sorted(p for p in self._folder.iterdir() if not p.name.startswith("."))
        for old in whole[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final
