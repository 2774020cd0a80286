"""The snapshots' files, beside everything else: brought in line with the history, copied elsewhere, mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protomodels_cli.coordinator.copies import Copies, in_words
from protomodels_cli.coordinator.history import History, Mark
from protomodels_cli.coordinator.snapshots import Snapshots


class Repeated:
    """Work that is done once more after every wish, however many come while it is under way."""

    def __init__(self, work: Callable[[], Awaitable[None]]):
        self._work, self._wished = work, False
        self._working: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        return self._working is not None and not self._working.done()

    def again(self) -> None:
        self._wished = True
        if not self.under_way:
            self._working = asyncio.create_task(self._until_nobody_wishes())

    async def _until_nobody_wishes(self) -> None:
        while self._wished:
            self._wished = False
            await self._work()

    async def end(self) -> None:
        if self._working is not None:
            await self._working


class Depot:
    def __init__(
        self,
        snapshots: Snapshots,
        copies: Copies | None,
        history: Callable[[], History],  # as it is in the journal
        say: Callable[[str], None],
        fail: Callable[[OSError], None],
    ):
        self._snapshots, self._copies, self._history, self._say, self._fail = snapshots, copies, history, say, fail
        self._settling, self._copying = Repeated(self._settle), Repeated(self._copy)

    def settle(self) -> None:
        """The history has other snapshots than before."""
        self._settling.again()

    async def end(self) -> None:
        await self._settling.end()
        if self._copies is not None and self._copying.under_way:
            self._say(f"copying the last snapshot to {self._copies.url} …")
        await self._copying.end()

    async def _settle(self) -> None:
        try:
            found = await asyncio.to_thread(self._snapshots.found)
            history = self._history()  # after the look: whatever was begun since then is not in `found`
            await asyncio.to_thread(self._snapshots.settle, history.snapshots, history.pending, found)
        except OSError as e:
            self._fail(e)
        if self._copies is not None:
            self._copying.again()

    async def _copy(self) -> None:
        assert self._copies is not None
        named = self._snapshots.named(self._history().snapshots)
        try:
            await asyncio.to_thread(self._copies.bring_up_to_date, named)
        except Exception as e:  # a store may raise anything
            why = in_words(e)
            self._say(f"snapshots cannot be copied to {self._copies.url}: {why}; the next one will be tried again")

    async def is_whole(self, mark: Mark, stage: int) -> bool:
        """Has this part the right bytes, now or once they are brought back from the copy?"""
        part = f"stage {stage}'s part of the snapshot of step {mark.step}"
        try:
            if await asyncio.to_thread(self._snapshots.is_whole, mark, stage):
                return True
            if self._copies is None:
                return False
            if await asyncio.to_thread(self._snapshots.replace_part, mark, stage, self._copies.get):
                self._say(f"{part} was damaged here, and is brought back from {self._copies.url}")
                return True
            self._say(f"{part} is damaged, here and at {self._copies.url}")
        except Exception as e:  # a store may raise anything
            self._say(f"{part} is damaged, and cannot be brought back: {in_words(e)}")
        return False
