"""Which run something on disk belongs to, and in which format it is written: what journal and snapshots carry.

Knows no files. A run's name may be anyone's; the fingerprint of its authority is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 3  # of run directories; 1 had no number, and one holder a stage; 2 other weights of two streams


@dataclass(frozen=True)
class RunIdentity:
    run: str  # the fingerprint of the run's authority
    spec_sha256: str
    format: int = FORMAT

    def name_in_store(self, name: str) -> str:
        """Of the folder of a run with this name: no other run has it."""
        return f"{name}-{self.run[:8]}"

    def check(self, right: RunIdentity) -> None:
        """Raises WrongIdentity where this is not `right`."""
        if self.format != right.format:
            what = f"has format {self.format}, and this pmtrain reads format {right.format}"
            raise WrongIdentity(what, kind="other_format")
        if self.run != right.run:
            what = f"belongs to another run (authority {self.run[:8]}…, and this run has {right.run[:8]}…)"
            raise WrongIdentity(what, kind="other_run")
        if self.spec_sha256 != right.spec_sha256:
            what = (
                f"was made with another spec (hash {self.spec_sha256[:8]}…, and this run has {right.spec_sha256[:8]}…)"
            )
            raise WrongIdentity(what, kind="other_spec")


class WrongIdentity(ValueError):
    """What is wrong, to be read after the name of the file."""

    def __init__(self, what: str, *, kind: str):
        super().__init__(what)
        self.kind = kind
