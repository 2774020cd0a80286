"""Which run something on disk belongs to, and in which format it is written: what journal and snapshots carry.

Knows no files. A run's name may be anyone's; the fingerprint of its authority is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 2  # of run directories; 1 had no number, and one holder a stage


@dataclass(frozen=True)
class Identity:
    run: str  # the fingerprint of the run's authority
    spec_sha256: str
    format: int = FORMAT

    def differs(self, right: Identity) -> str | None:
        """What is wrong where `right` was expected, in words."""
        if self.format != right.format:
            return f"it has format {self.format}, and this pmtrain reads format {right.format}"
        if self.run != right.run:
            return f"it is another run's (authority {self.run[:8]}…, and this run's is {right.run[:8]}…)"
        if self.spec_sha256 != right.spec_sha256:
            return f"it was made with another spec (hash {self.spec_sha256[:8]}…, not {right.spec_sha256[:8]}…)"
        return None
