"""U and T_fixed as the whole run must have them: made or checked here, sent from here, kept on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.model.basis import Basis, basis_from_bytes, basis_to_bytes, initial_basis
from protomodels_cli.model.shape import Shape
from protomodels_cli.model.stage import t_fixed_of
from protomodels_cli.model.t_fixed import VERSION as T_FIXED_VERSION
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

MOST_SKEWED = 1e-4  # ‖UᵀU − I‖_F that a basis from outside may have; ours have 6e-8


class Subspace:
    """Only for forms that have one."""

    def __init__(self, spec: RunSpec, folder: Path):
        self._spec, self._folder = spec, folder
        self._shape = Shape.of(spec)
        self.t_fixed_sha256 = t_fixed_of(spec).sha256()
        self._bases: dict[int, Basis] = {}
        folder.mkdir(exist_ok=True)
        self._bases[0] = initial_basis(self._shape.width, spec.subspace.k, spec.seed, self._shape.dtype)

    @property
    def basis_bytes(self) -> int:
        return self._shape.width * self._spec.subspace.k * self._shape.dtype.itemsize

    def sha256(self, version: int) -> str:
        return self._bases[version].sha256

    async def accept(self, version: int, content: bytes) -> Basis:
        """A basis that the last stage computed. Raises ValueError if it cannot be one."""
        basis = basis_from_bytes(version, content, (self._shape.width, self._spec.subspace.k), self._shape.dtype)
        if not basis.orthonormality_error <= MOST_SKEWED:
            raise ValueError(f"‖UᵀU − I‖ is {basis.orthonormality_error:.2g}: not orthonormal")
        await asyncio.to_thread(write_whole, self._file(version), basis_to_bytes(basis))
        self._bases[version] = basis
        return basis

    def load(self, version: int, sha256: str) -> None:
        """One that was accepted before."""
        if version in self._bases:
            return
        try:
            content = self._file(version).read_bytes()
            basis = basis_from_bytes(version, content, (self._shape.width, self._spec.subspace.k), self._shape.dtype)
        except (OSError, ValueError) as e:
            raise UserError(f"{self._file(version)} cannot be read: {e}", "put it back from a copy") from None
        if basis.sha256 != sha256:
            raise UserError(
                f"{self._file(version)} is damaged: not the basis of the journal", "put it back from a copy"
            )
        self._bases[version] = basis

    def forget(self, current: int, needed: set[int]) -> None:
        """Older ones, but for these and the first, which is made from the seed. A newer one may be adopted just now."""
        for old in [v for v in self._bases if 0 < v < current and v not in needed]:
            del self._bases[old]
            self._file(old).unlink(missing_ok=True)

    def _file(self, version: int) -> Path:
        return self._folder / f"{version:06d}.u"

    def basis_message(self, version: int) -> pb.Basis:
        basis = self._bases[version]
        return pb.Basis(version=version, u=basis_to_bytes(basis), sha256=basis.sha256)

    def table_message(self) -> pb.Table:
        table = self._spec.subspace.t_fixed
        return pb.Table(seed=table.seed, scale=table.scale, version=T_FIXED_VERSION, sha256=self.t_fixed_sha256)
