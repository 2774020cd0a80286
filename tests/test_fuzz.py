"""The fuzzer over every decoder, for a moment; scripts/fuzz.sh takes as long as you like."""

from __future__ import annotations

import random

import pytest
from fuzzing import Decoder, changed, decoders, execute

EXECUTIONS = 150


@pytest.mark.parametrize("name", decoders())
def test_a_decoder_returns_or_refuses(name):
    decoder = decoders()[name]
    for content in decoder.valid:
        decoder.decode(content)
    for number in range(EXECUTIONS):
        execute(name, number)


def test_changes_are_many_and_the_same_every_time():
    valid = (bytes(range(64)), b"other")
    contents = [changed(valid, random.Random(number)) for number in range(500)]
    assert contents == [changed(valid, random.Random(number)) for number in range(500)]
    assert len(set(contents)) > 400
    assert {len(content) for content in contents} >= {63, 64, 65}


@pytest.mark.parametrize("fault", ["other_error", "slow"])
def test_what_a_decoder_must_not_do_is_found(fault, monkeypatch):
    def decode(content: bytes) -> None:
        if fault == "other_error" and content[:1] != b"a":
            raise KeyError
        if fault == "slow":
            monkeypatch.setattr("fuzzing.SLOW", -1.0)

    monkeypatch.setitem(decoders(), "broken", Decoder((b"abcd",), decode, (ValueError,)))
    with pytest.raises(AssertionError, match="broken"):
        all(execute("broken", number) is None for number in range(100))
