"""The fuzzer over every decoder, for a moment; scripts/fuzz.sh takes as long as you like."""

from __future__ import annotations

import asyncio
import random

import fuzzing_rpcs
import pytest
from fuzzing import Decoder, changed, decoders, execute
from told import events
from waiting import wait_for

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


@pytest.mark.full
def test_rpcs_of_a_live_coordinator_answer_whatever_comes(pool):
    run_dir = fuzzing_rpcs.a_run(pool)
    before = len(events(run_dir, "snapshot_complete"))
    codes, grown = asyncio.run(fuzzing_rpcs.against_coordinator(run_dir, pool.coordinator.pid, 400))
    assert {name for name, _ in codes} == set(fuzzing_rpcs.rpcs())
    assert {code for _, code in codes} >= {"OK", "INVALID_ARGUMENT", "PERMISSION_DENIED"}
    assert grown < fuzzing_rpcs.KEPT
    wait_for(lambda: len(events(run_dir, "snapshot_complete")) > before, "it trains no more")
    assert not [e for e in events(run_dir, "peer_dismissed") if e["reason"]["kind"] == "unprocessable_message"]


def test_a_live_peers_port_answers_its_neighbour_whatever_comes():
    codes = asyncio.run(fuzzing_rpcs.against_peer(150))
    assert codes["OK"]
    assert codes["INVALID_ARGUMENT"]
