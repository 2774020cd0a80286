"""The coordinator's page: what of its state goes there, and when the page opens and closes. Decides nothing, and
whatever fails here does not end the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protomodels_cli.coordinator.file_names import EVENTS, METRICS
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.state import State
from protomodels_cli.files import write_whole
from protomodels_cli.installing import address_of, block, ways
from protomodels_cli.observe import logs
from protomodels_cli.observe.page.address import Where
from protomodels_cli.observe.page.keys import Keys
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

if TYPE_CHECKING:
    from protomodels_cli.observe.page.contents import Beside
    from protomodels_cli.observe.page.server import Page

PAGE = "page"  # in the run directory: the owner's link to the page, and the one to pass on


@dataclass(frozen=True)
class Links:
    owner: str
    viewing: str  # empty where whoever is on this machine may look


def links_of(where: Where, run_dir: RunDir) -> Links:
    keys = Keys.of(run_dir.owner)
    logs.hide(keys.owner, keys.viewing)
    return Links(f"{where.url}?key={keys.owner}", f"{where.url}?key={keys.viewing}" if where.asked else "")


def write_links(links: Links, run_dir: RunDir) -> None:
    text = "\n".join(filter(None, (links.owner, links.viewing)))
    write_whole(run_dir.path / PAGE, f"{text}\n".encode(), 0o600)


def invitation(folder: RunDir) -> str:
    """What others paste to take part: with the installation, where it is known from where."""
    joining, address = f"join '{folder.last_link()}'", address_of(folder.path)
    return f"pmtrain {joining}" if address is None else block(ways(address)["pip"], joining)


def _import() -> None:
    """What the page needs, beside the event loop."""
    import protomodels_cli.observe.page.server
    import protomodels_cli.observe.prometheus  # noqa: F401


class Watching:
    """Opens the page beside the run: what that imports takes a while, and a coordinator that comes back has peers that
    wait for it. Until then the system keeps whoever comes."""

    def __init__(
        self,
        where: Where,
        run_dir: RunDir,
        state: Callable[[], State],
        status: Callable[[], pb.RunStatus],
        round_trips: Callable[[], Mapping[str, float]],
        prompt: str | None = None,
    ):
        self._where, self._run_dir, self._prompt = where, run_dir, prompt
        self._state, self._status, self._round_trips = state, status, round_trips
        self._page: Page | None = None
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._open()))

    async def _open(self) -> None:
        try:
            await asyncio.to_thread(_import)
            self._page = self._made()
            await self._page.open()
        except Exception as e:  # the run goes on
            traceback.print_exception(e)
            logs.bug(e)

    def _made(self) -> Page:
        from protomodels_cli.observe.page.contents import Contents, Sources
        from protomodels_cli.observe.page.sample import Sampler
        from protomodels_cli.observe.page.server import Page, Parts
        from protomodels_cli.observe.page.veil import Veil
        from protomodels_cli.observe.prometheus import OfStatus, text_of

        folder, keys = self._run_dir, Keys.of(self._run_dir.owner)
        secrets = (folder.token, folder.owner, keys.owner, keys.viewing, folder.authority.fingerprint)
        veil = Veil(secrets, (folder.path, folder.base, Path.home()))
        sampler = None
        if self._prompt is not None:
            sampler = Sampler(folder.path, self._prompt, lambda: self._state().history.newest.step)
            self._tasks.append(asyncio.create_task(sampler.run()))
        sources = Sources(
            self._status,
            self._beside,
            folder.path / METRICS,
            folder.path / EVENTS,
            frozenset(notice.kind for notice in Notice.__args__ if notice.level >= logging.WARNING),
            lambda: None if sampler is None else sampler.shown,
        )
        parts = Parts(
            Contents(sources, veil),
            keys,
            lambda: invitation(folder),
            lambda viewers: text_of(OfStatus(self._status, viewers)),
        )
        return Page(self._where, parts)

    def _beside(self) -> Beside:
        from protomodels_cli.observe.page.contents import Beside

        state = self._state()
        history = state.history
        stages = len(history.layers)
        return Beside(
            kept=[(mark.step, len(mark.parts)) for mark in history.snapshots if mark.step],
            pending=[(m.step, len(state.saving.arrived.get(m.key, ())), stages) for m in history.pending],
            round_trips=self._round_trips(),
            run=self._run_dir.shown_as,
            now=time.time(),
            ended=("done" if history.over else "stopped") if self._closing else "",
        )

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks[1:]:  # the sampler's
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=5)
        with contextlib.suppress(OSError):
            if self._page is None:
                self._where.socket.close()
            else:
                await self._page.close()
