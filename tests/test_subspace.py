"""The run's bases on the coordinator's disk: the first is made once, what is read back is what the journal means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import make_spec

from protomodels_cli.coordinator import subspace
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.errors import UserError

SPEC = make_spec(subspace={"form": "reparam"})


def elsewhere(width: int, k: int, seed: int, dtype: str) -> np.ndarray:
    """The first basis as another platform makes it: not the same in the last bits."""
    return np.nextafter(np.eye(width, k, dtype=dtype), 2)


def stored(folder: Path) -> Subspace:
    """A new run's."""
    new = Subspace(SPEC, folder, resumed=False)
    new.store_first()
    return new


def test_a_run_that_is_continued_elsewhere_keeps_its_first_basis(tmp_path, monkeypatch):
    new = stored(tmp_path)
    monkeypatch.setattr(subspace, "initial_u", elsewhere)
    resumed = Subspace(SPEC, tmp_path, resumed=True)
    resumed.load(0, new.sha256(0))
    assert resumed.basis_message(0) == new.basis_message(0)
    other = stored(tmp_path)  # over what a start left that came no further
    assert other.basis_message(0).u == elsewhere(SPEC.model.width, SPEC.subspace.k, 0, "float32").tobytes()


def test_a_first_basis_that_was_lost_is_made_again_and_checked(tmp_path, monkeypatch):
    right = stored(tmp_path).sha256(0)
    (tmp_path / "000000.u").unlink()
    Subspace(SPEC, tmp_path, resumed=True).load(0, right)
    monkeypatch.setattr(subspace, "initial_u", elsewhere)
    with pytest.raises(UserError, match=r"000000\.u"):
        Subspace(SPEC, tmp_path, resumed=True).load(0, right)


@pytest.mark.parametrize("change", [lambda u: u[:-1], lambda u: bytes([u[0] ^ 1]) + u[1:]])
def test_a_damaged_basis_is_refused(tmp_path, change):
    right = stored(tmp_path).sha256(0)
    (tmp_path / "000000.u").write_bytes(change((tmp_path / "000000.u").read_bytes()))
    with pytest.raises(UserError, match=r"000000\.u"):
        Subspace(SPEC, tmp_path, resumed=True).load(0, right)
