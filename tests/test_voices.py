"""Who counts as one person: a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_bench import peer

from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.tokens import OWN
from protomodels_cli.coordinator.voices import are_independent, voice_of


def a(i: int, token: str = OWN, address: str = "192.0.2.1", person: str = "") -> Peer:
    return replace(peer(i), token=token, address=address, person=person)


@pytest.mark.parametrize(
    ("one", "other", "voices", "independent"),
    [
        (a(1, "x"), a(2, "x", "192.0.2.2"), 1, False),
        (a(1, "x"), a(2, "y"), 2, True),
        (a(1, "x", person="anna"), a(2, "y", "192.0.2.2", person="anna"), 1, False),
        (a(1, "x", person="anna"), a(2, "y", person="ben"), 2, True),
        (a(1), a(2), 1, False),
        (a(1), a(2, address="192.0.2.2"), 2, True),
        (a(1, address="2001:db8::1"), a(2, address="2001:db8::2"), 1, False),
        (a(1, address="2001:db8::1"), a(2, address="2001:db8:0:1::1"), 2, True),
        (a(1), a(2, "x"), 2, False),  # a machine more behind the same router
        (a(1), a(2, "x", "192.0.2.2"), 2, True),
        (a(1, "", ""), a(2, "", ""), 1, False),
    ],
)
def test_whose_word_it_is(one: Peer, other: Peer, voices: int, independent: bool):
    assert len({voice_of(one), voice_of(other)}) == voices
    assert are_independent(one, other) == are_independent(other, one) == independent
