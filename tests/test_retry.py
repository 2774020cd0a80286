"""When to try again and when to give up, over any failures and any clock; and files that are whole or not there."""

from __future__ import annotations

import asyncio
import math
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.files import write_whole
from protomodels_cli.retry import Backoff, retry

SECONDS = st.floats(0.001, 1000)
CHANCE = st.floats(0, 1, exclude_max=True)


@given(SECONDS, SECONDS, st.floats(0, 1), st.lists(CHANCE, min_size=1, max_size=100))
def test_waits_double_up_to_the_longest_less_the_jitter(first, longest, jitter, chances):
    drawn = iter(chances)
    backoff = Backoff(first, longest, jitter=jitter, chance=lambda: next(drawn))
    for i, chance in enumerate(chances):
        right = min(first * 2**i, longest) * (1 - jitter * chance)
        assert backoff.after_failure(now=float(i)) == pytest.approx(right)
    backoff.reset()
    backoff._chance = lambda: 0.0
    assert backoff.after_failure(now=1e6) == pytest.approx(min(first, longest))


@given(SECONDS, SECONDS, st.floats(0, 1e5), st.floats(0, 1e6), st.lists(SECONDS, max_size=200))
def test_it_gives_up_when_the_time_is_over_and_not_before(first, longest, patience, start, each_try):
    """A try takes time too. It never waits beyond its time, and the first failure after a success starts a new one."""
    backoff, now = Backoff(first, longest, give_up_after=patience), start
    for seconds in each_try:
        wait = backoff.after_failure(now)
        over = now - start >= patience
        assert (wait is None) == over or now - start == pytest.approx(patience)
        if wait is None:
            break
        assert 0 <= wait <= longest
        assert now + wait <= start + patience or now + wait == pytest.approx(start + patience)
        now += wait + seconds
    backoff.reset()
    assert (backoff.after_failure(now + 1e7) is None) == (patience == 0)


@given(st.integers(1, 50))
def test_it_gives_up_after_so_many_tries(most):
    backoff = Backoff(1.0, most_tries=most)
    assert [backoff.after_failure(0.0) is None for _ in range(most)] == [False] * (most - 1) + [True]


def test_work_is_tried_until_it_succeeds_or_fails_in_another_way_or_time_is_over():
    async def story(fails: list[Exception | None], **patience: float) -> tuple[object, list[str]]:
        left, heard = list(fails), []

        async def work() -> str:
            if (error := left.pop(0)) is not None:
                raise error
            return "done"

        try:
            found: object = await retry(
                work, Backoff(0.001, **patience), (OSError, KeyError), lambda e: heard.append(str(e))
            )
        except Exception as e:
            found = e
        return found, heard

    down, other = OSError("down"), ValueError("other")
    assert asyncio.run(story([down, down, None])) == ("done", ["down", "down"])
    assert asyncio.run(story([down, other, None])) == (other, ["down"])
    assert asyncio.run(story([down, down, None], most_tries=2)) == (down, ["down"])
    assert asyncio.run(story([down, None], give_up_after=0.0)) == (down, [])
    assert asyncio.run(story([KeyError("k"), None], give_up_after=math.inf)) == ("done", ["'k'"])


def test_a_file_is_whole_or_as_it_was_and_never_readable_by_more_than_it_should_be(tmp_path: Path, monkeypatch):
    path, elsewhere, seen = tmp_path / "key", tmp_path / "elsewhere", []
    elsewhere.write_text("untouched")
    opened, sync = os.open, os.fsync

    def watched(name, flags, mode=0o777, **rest):
        handle = opened(name, flags, mode, **rest)
        if flags & os.O_CREAT:
            seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return handle

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)  # the least careful user
    try:
        for i, crash in enumerate((None, lambda p: p.write_bytes(b"x"), lambda p: p.symlink_to(elsewhere))):
            if crash is not None:
                crash(tmp_path / ".key.partial")
            write_whole(path, b"secret %d" % i, 0o600)
            assert path.read_bytes() == b"secret %d" % i
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert seen == [0o600] * 3
    assert elsewhere.read_text() == "untouched"

    def full(handle: int) -> None:
        sync(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="28") as error:
        write_whole(path, b"half", 0o600)
    assert error.value.errno == 28
    assert path.read_bytes() == b"secret 2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "key"]
