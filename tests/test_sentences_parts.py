"""What is said of a part of a snapshot that could not be saved."""

from __future__ import annotations

from typing import get_args

import pytest
from wording import check_wording

from protomodels_cli.coordinator.sentences import part_failure
from protomodels_cli.coordinator.snapshots import failures as f

SAID: list[tuple[f.PartFailure, str]] = [
    (f.NotWritten("No space left on device"), "No space left on device"),
    (f.TooLarge(3 << 20, 2 << 20), "the part has 3 MiB, and may have 2 MiB at most"),
    (f.NoRoom(3 << 20), "the coordinator's disk lacks 3 MiB"),
    (f.NoTensors("the header is not JSON"), "the part is not a safetensors file: the header is not JSON"),
    (f.WrongTensor("basis/u", "", "F32 [32, 6]"), "the part lacks basis/u (F32 [32, 6])"),
    (f.WrongTensor("weights/y", "F32 [2]", ""), "the part has weights/y (F32 [2]), which the stage does not have"),
    (f.WrongTensor("weights/x", "F32 [1]", "F32 [32]"), "the part's weights/x is F32 [1] instead of F32 [32]"),
    (f.WrongTensor("weights/x", "not finite", "finite"), "the part's weights/x is not finite"),
    (f.Overdue(300.0), "the part was not uploaded within 5 min"),
]


@pytest.mark.parametrize(("failure", "text"), SAID)
def test_what_is_said(failure: f.PartFailure, text: str):
    assert part_failure(failure) == text
    check_wording(text)


def test_every_kind_is_said():
    assert {type(failure) for failure, _ in SAID} == set(get_args(f.PartFailure))
