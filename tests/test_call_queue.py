"""Whose call is served next, where many come from one address."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.coordinator.call_queue import Turns


def said(turns: Turns, connection: int, caller: str = "here") -> tuple[int, tuple[int, ...]]:
    """A call that says something at once: its number, and calls whose turn it is."""
    number, _ = turns.come(caller, connection)
    return number, turns.said(number).served


def test_the_connection_with_the_fewest_turns_comes_first_and_then_the_oldest():
    turns = Turns(served=1, silent=9, waiting=9)
    first, served = said(turns, 1)
    assert served == (first,)
    again, later, newcomer = (said(turns, connection)[0] for connection in (1, 2, 3))
    order, running = [], first
    for _ in range(3):
        [running] = turns.end(running).served
        order.append(running)
    assert order == [later, newcomer, again]
    assert turns.end(running).served == ()
    assert [*turns._calls, *turns._callers] == [], "callers do not pile up"


def test_silent_calls_are_in_nobodys_way():
    turns = Turns(served=2, silent=100, waiting=9)
    for connection in range(50):
        turns.come("here", connection)
    newcomer, served = said(turns, 51)
    assert served == (newcomer,)


def test_of_too_many_silent_calls_the_newest_of_the_largest_crowd_goes():
    turns = Turns(served=1, silent=3, waiting=9)
    numbers = [turns.come("here", connection)[0] for connection in (1, 2, 2)]
    number, changes = turns.come("here", 3)
    assert changes.dropped == (numbers[2],)
    assert turns.said(number).served == (number,)
    assert not turns.said(numbers[2]).served, "it was refused"
    assert turns.come("elsewhere", 2)[1].dropped == ()


def test_of_too_many_that_wait_the_last_in_order_goes():
    turns = Turns(served=1, silent=9, waiting=2)
    running, _ = said(turns, 1)
    busy = said(turns, 1)[0]
    said(turns, 2)
    number, _ = turns.come("here", 3)
    assert turns.said(number).dropped == (busy,), "its connection has had a turn"
    turns.end(busy)
    assert len(turns.end(running).served) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=200))
def test_a_turn_comes_for_every_call_that_was_not_refused(moves: list[tuple[int, int]]):
    """Whatever callers do, no more are served than may be, and none waits while there is room."""
    turns, silent, waiting, running = Turns(served=2, silent=4, waiting=3), set[int](), set[int](), set[int]()

    def apply(served: tuple[int, ...], dropped: tuple[int, ...] = ()) -> None:
        for number in dropped:
            silent.discard(number)
            waiting.discard(number)
            turns.end(number)
        for number in served:
            waiting.remove(number)
            running.add(number)

    for move, which in moves:
        if move == 0:
            number, changes = turns.come("here", which)
            silent.add(number)
            apply(changes.served, changes.dropped)
        elif move == 1 and silent:
            number = sorted(silent)[which % len(silent)]
            silent.remove(number)
            waiting.add(number)
            changes = turns.said(number)
            apply(changes.served, changes.dropped)
        elif move == 2 and running:
            number = sorted(running)[which % len(running)]
            running.remove(number)
            apply(turns.end(number).served)
        elif move == 3 and waiting:
            number = sorted(waiting)[which % len(waiting)]
            waiting.remove(number)
            apply(turns.end(number).served)
        assert len(running) <= 2
        assert len(silent) <= 4
        assert len(waiting) <= 3
        assert not waiting or len(running) == 2
