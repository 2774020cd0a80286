"""The snapshots' files, beside everything else: brought in line with the history, copied elsewhere, mended. And the
journal's copy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.snapshots.copies import Copies, OutOfReach, in_words
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.manifest import folder_name, part_name, stored_name
from protomodels_cli.coordinator.snapshots.store import Snapshots, patiently
from protomodels_cli.errors import UserError
from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.quantities import duration

if TYPE_CHECKING:
    from protomodels_cli.coordinator.deposit import Deposit

T = TypeVar("T")
STALL_SECONDS = 60.0  # in which something of a part must come from the store


class Repeated:
    """Work that runs again after every request; requests that come while it runs are merged into one."""

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


async def beside(work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """In a daemon thread, which does not hold up the end of the program: a store may hang."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(do: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            do(value)

    def run() -> None:
        try:
            found: tuple[Any, Any] = result.set_result, work(*arguments, **options)
        except BaseException as e:
            found = result.set_exception, e
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *found)

    threading.Thread(target=run, daemon=True).start()
    return cast(T, await result)


async def within(seconds: float, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """As `beside`, for so long at most: then raises TimeoutError, and leaves the thread to itself."""
    try:
        async with asyncio.timeout(seconds):
            return await beside(work, *arguments, **options)
    except TimeoutError as e:
        raise TimeoutError(str(e) or f"no answer within {duration(seconds)}") from None


class Upkeep:
    def __init__(
        self,
        run: Run,
        snapshots: Snapshots,
        copies: Copies | None,
        first: FirstSnapshot | None = None,  # where the run starts from a checkpoint
        deposit: Deposit | None = None,  # where the journal goes to the store as well
    ):
        self._run, self._snapshots, self._copies = run, snapshots, copies
        self._first, self._deposit = first, deposit
        self._settling, self._copying = Repeated(self._settle), Repeated(self._copy)
        self._looks: dict[tuple[int, int, int], asyncio.Task[bool]] = {}

    def settle(self) -> None:
        """Bring the files in line with the history, whose snapshots have changed."""
        self._settling.again()

    async def end(self) -> None:
        await self._settling.end()
        if self._copies is not None and self._copying.under_way:
            self._run.tell(notices.CopyingLast(self._copies.url))
        await self._copying.end()
        if self._deposit is not None:
            await self._deposit.end()

    def journalled(self) -> None:
        """The journal has grown."""
        if self._deposit is not None:
            self._deposit.again()

    async def _settle(self) -> None:
        try:
            await asyncio.to_thread(self._snapshots.settle, lambda: self._run.history)
        except OSError as e:
            self._run.fail(e)
        if self._copies is not None:
            self._copying.again()

    async def _copy(self) -> None:
        assert self._copies is not None
        history = self._run.history
        complete = self._snapshots.folders(history.snapshots)
        # Of one that was given up peers may have put parts there; until a later one is complete it may be begun again.
        over = [old for old in history.dropped if old.complete or old.key < history.newest.key]
        dropped = [folder_name(*old.key) for old in over if not old.unusable]
        try:
            await beside(self._copies.bring_up_to_date, complete, dropped, self._snapshots.reading)
        except Exception as e:  # a store may raise anything
            self._run.tell(notices.CopyFailed(self._copies.url, in_words(e)))
        try:  # what was dropped while it was being copied
            await asyncio.to_thread(self._snapshots.settle, lambda: self._run.history)
        except OSError as e:
            self._run.fail(e)

    async def is_whole(self, mark: Mark, stage: int) -> bool:
        """Does this part have the right bytes, now or once restored from the copy or cut again from the checkpoint?
        Raises OutOfReach where only the store could tell. Concurrent calls share one check."""
        part = mark.lineage, mark.step, stage
        if part not in self._looks:
            self._looks[part] = asyncio.create_task(self._look(mark, stage))
            self._looks[part].add_done_callback(lambda _: self._looks.pop(part))
        return await asyncio.shield(self._looks[part])

    async def _look(self, mark: Mark, stage: int) -> bool:
        try:
            if await patiently(self._snapshots.is_whole, mark, stage):
                return True
        except OSError as e:  # to us it is as good as gone
            SNAPSHOTS.warning("cannot read stage %d's part of the snapshot at step %d: %s", stage, mark.step, e)
        away: OutOfReach | None = None
        if self._copies is not None:
            try:
                if await self._restore(mark, stage, self._copies):
                    return True
            except OutOfReach as e:
                away = e
        if self._first is not None and mark.source and await self._cut_again(mark, stage, self._first):
            return True
        if away is not None:
            raise away
        return False

    async def _restore(self, mark: Mark, stage: int, copies: Copies) -> bool:
        try:
            whole = await self._bring_back(mark, stage, copies)
        except Exception as e:  # a store may raise anything
            raise OutOfReach(in_words(e)) from None
        kind = notices.PartRestored if whole else notices.PartDamaged
        self._run.tell(kind(stage, mark.step, copies.url))
        return whole

    async def _cut_again(self, mark: Mark, stage: int, first: FirstSnapshot) -> bool:
        """The checkpoint may have changed since: what is cut has the right hash, or it does not count."""
        try:
            whole = await beside(
                self._snapshots.replace_part, mark, stage, lambda _, __, to: first.write_part(mark.layers, stage, to)
            )
        except (OSError, UserError) as e:
            SNAPSHOTS.warning("cannot cut stage %d's part from the checkpoint again: %s", stage, e)
            return False
        if whole:
            self._run.tell(notices.PartRestored(stage, mark.step, str(first.checkpoint)))
        return whole

    async def _bring_back(self, mark: Mark, stage: int, copies: Copies) -> bool:
        for name in (part_name(stage), stored_name(stage, mark.parts[stage])):
            with contextlib.suppress(FileNotFoundError):
                get = _Get(copies, name)
                return await get.unless_it_stalls(beside(self._snapshots.replace_part, mark, stage, get))
        if not await within(STALL_SECONDS, copies.has_anything):
            raise OutOfReach("nothing of this run is there")
        return False


class _Get:
    """Gets a file from the store, under the name that it has there."""

    def __init__(self, copies: Copies, name: str):
        self._copies, self._name = copies, name
        self._to: Path | None = None

    def __call__(self, snapshot: str, _: str, to: Path) -> None:
        self._to = to
        self._copies.get(snapshot, self._name, to)

    async def unless_it_stalls(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Raises TimeoutError, and leaves the thread to itself, once nothing more comes: a store may hang."""
        task, size = asyncio.create_task(work), -1
        while size < (size := self._size()):
            await asyncio.wait([task], timeout=STALL_SECONDS)
            if task.done():
                return await task
        task.cancel()
        raise TimeoutError(f"no answer within {duration(STALL_SECONDS)}")

    def _size(self) -> int:
        try:
            return 0 if self._to is None else self._to.stat().st_size
        except FileNotFoundError:
            return 0
