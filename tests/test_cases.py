from __future__ import annotations

from itertools import product

import pytest
from cases import some

CASES = [*product(range(7), "abc", (True, False))]


@pytest.mark.parametrize("share", [2, 3, 40])
def test_a_share_of_the_cases_has_every_value_in_its_place(share, monkeypatch):
    monkeypatch.delenv("PMTRAIN_ALL_CASES", raising=False)
    chosen = some(CASES, share)
    assert chosen == some(CASES, share) == [case for case in CASES if case in chosen]
    assert len(CASES) // share <= len(chosen) < len(CASES)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(range(7)), set("abc"), {True, False}]


def test_all_of_them_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("PMTRAIN_ALL_CASES", "1")
    assert some(CASES) == CASES
