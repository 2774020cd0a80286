"""The name of a stage's part of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    lineage: int
    step: int
    stage: int
    sha256: str

    @property
    def snapshot(self) -> tuple[int, int]:
        return self.lineage, self.step
