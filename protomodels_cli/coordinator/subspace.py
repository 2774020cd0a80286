"""U and T_fixed as the whole run must have them: made or checked here, sent from here, kept on disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.snapshots.manifest import basis_name
from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.protocol.basis import initial_u, orthonormality_error, u_from_bytes, u_sha256
from protomodels_cli.protocol.t_fixed import VERSION as T_FIXED_VERSION
from protomodels_cli.protocol.t_fixed import sign_blocks, t_fixed_sha256
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

MOST_SKEWED = 1e-4  # ‖UᵀU − I‖_F that a basis from outside may have; ours have 6e-8


@dataclass(frozen=True)
class _Kept:
    content: bytes
    sha256: str


class Subspace:
    """The bases and T_fixed of a run whose form has them."""

    def __init__(self, spec: RunSpec, folder: Path, resumed: bool):
        self._spec, self._folder = spec, folder
        self._width, self._k, self._dtype = spec.model.width, spec.subspace.k, spec.compute.stored
        table = spec.subspace.t_fixed
        signs = sign_blocks(spec.vocab_size, self._width, table.seed)
        self.t_fixed_sha256 = t_fixed_sha256(signs, spec.vocab_size, self._width, table.scale)
        folder.mkdir(exist_ok=True)
        self._one_at_a_time = asyncio.Lock()  # a version that is deleted may come again after a rollback
        self._bases = {0: self._read(0) if resumed and self._file(0).exists() else self._make_first()}

    def _make_first(self) -> _Kept:
        first = initial_u(self._width, self._k, self._spec.seed, self._dtype)
        return _Kept(first.tobytes(), u_sha256(first))

    def store_first(self) -> None:
        """Once per run: the last bits of QR differ by platform, and a run may be continued on another machine."""
        write_whole(self._file(0), self._bases[0].content)

    @property
    def basis_bytes(self) -> int:
        return self._width * self._k * np.dtype(self._dtype).itemsize

    @property
    def first_hashes(self) -> tuple[str, tuple[int, str]]:
        """Of the first basis, and with its version of T_fixed."""
        return self.sha256(0), (T_FIXED_VERSION, self.t_fixed_sha256)

    def sha256(self, version: int) -> str:
        return self._bases[version].sha256

    async def accept(self, version: int, content: bytes) -> str:
        """Store a basis that the last stage computed; returns the hash. Raises ValueError if it is not a basis."""
        async with self._one_at_a_time:
            self._bases[version] = await asyncio.to_thread(self._store, version, content)
        return self._bases[version].sha256

    def _store(self, version: int, content: bytes) -> _Kept:
        u = u_from_bytes(content, (self._width, self._k), self._dtype)
        error = orthonormality_error(u)
        if not error <= MOST_SKEWED:
            raise ValueError(f"the basis is not orthonormal: ‖UᵀU − I‖ is {error:.2g}, and {MOST_SKEWED:g} is the most")
        write_whole(self._file(version), content)
        return _Kept(content, u_sha256(u))

    def load(self, version: int, sha256: str) -> None:
        """A basis that was accepted before, from disk."""
        if version not in self._bases:
            self._bases[version] = self._read(version)
        if self._bases[version].sha256 != sha256:
            raise _unusable(self._file(version), "the journal has another hash (hash mismatch)", "basis_mismatch")

    def _read(self, version: int) -> _Kept:
        try:
            content = self._file(version).read_bytes()
            return _Kept(content, u_sha256(u_from_bytes(content, (self._width, self._k), self._dtype)))
        except (OSError, ValueError) as e:
            raise _unusable(self._file(version), str(e), "basis_unreadable") from None

    async def forget(self, current: int, needed: set[int]) -> None:
        """Delete the bases before `current` that are not needed, but not the first, with which the run began. A newer
        one than `current` may be about to be adopted."""
        async with self._one_at_a_time:
            for old in [v for v in self._bases if 0 < v < current and v not in needed]:
                del self._bases[old]
                await asyncio.to_thread(self._file(old).unlink, missing_ok=True)

    def _file(self, version: int) -> Path:
        return self._folder / basis_name(version)

    def basis_message(self, version: int) -> pb.Basis:
        basis = self._bases[version]
        return pb.Basis(version=version, u=basis.content, sha256=basis.sha256)

    def table_message(self) -> pb.Table:
        table = self._spec.subspace.t_fixed
        return pb.Table(seed=table.seed, scale=table.scale, version=T_FIXED_VERSION, sha256=self.t_fixed_sha256)


def _unusable(file: Path, why: str, kind: str) -> UserError:
    return UserError(f"cannot use the basis {file}: {why}", f"restore {file} from a copy", kind=kind)


def bases_needed(history: History) -> dict[int, str]:
    """Version and hash of every basis that may still be needed."""
    found = {mark.basis_version: mark.basis_sha256 for mark in (*history.snapshots, *history.pending)}
    found[history.basis_version] = history.basis_sha256
    waiting = [mark.next_basis for mark in (*history.snapshots, *history.pending)]
    found |= {new.version: new.sha256 for new in (*waiting, history.next_basis) if new is not None}
    return found
