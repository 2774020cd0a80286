"""Calls that are turned away: once or twice happens to honest peers, and ten times is told."""

from __future__ import annotations

from protomodels_cli.coordinator.notices import TurnedAway
from protomodels_cli.coordinator.turned_away import MOST_KEPT, RefusedCalls


def test_the_tenth_hundredth_and_thousandth_call_of_a_network_are_told():
    away = RefusedCalls()
    told = [notice for _ in range(1200) if (notice := away.note("203.0.113.9", "parts", "p2")) is not None]
    assert told == [TurnedAway("203.0.113.9", "parts", times, "p2") for times in (10, 100, 1000)]


def test_networks_and_kinds_of_calls_are_counted_apart():
    away = RefusedCalls()
    for network in ("203.0.113.9", "2001:db8::/64"):
        assert [away.note(network, what) for _ in range(9) for what in ("parts", "too_many_calls")] == [None] * 18
    assert away.note("203.0.113.9", "too_many_calls") == TurnedAway("203.0.113.9", "too_many_calls", 10)


def test_of_many_networks_the_last_are_remembered():
    away = RefusedCalls()
    for number in range(3 * MOST_KEPT):
        assert away.note(f"network {number}", "parts") is None
    assert len(away._times) == MOST_KEPT
