"""`pmtrain status` and `pmtrain peers`: how a run is doing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.console import RenderableType

    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

WATCH_SECONDS = 1.0
Format = Literal["text", "json"]
Run = Annotated[str, typer.Argument(metavar="LINK|RUN_DIR", help="The join link, or the run directory.")]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Refresh every second, until the run is over or Ctrl-C.")]


def status(run: Run, output: FormatOption = "text", watch: WatchOption = False) -> None:
    """Show what a run is doing and what it is waiting for."""
    from protomodels_cli.observe.view import picture

    _show(run, output, watch, picture, None)


def peers(run: Run, output: FormatOption = "text", watch: WatchOption = False) -> None:
    """List the peers of a run."""
    from protomodels_cli.observe.view import peer_table

    _show(run, output, watch, peer_table, "peers")


def _show(run: str, output: Format, watch: bool, draw: Callable[[RunStatus], RenderableType], part: str | None) -> None:
    import json

    from rich.console import Console
    from rich.live import Live

    from protomodels_cli.observe.fields import fields

    def as_json(s: RunStatus) -> str:
        return json.dumps(fields(s)[part] if part else fields(s), indent=None if watch else 1)

    async def once() -> RunStatus:
        async for s in _statuses(run, watch=False):
            return s
        raise AssertionError("unreachable")

    async def again(console: Console) -> None:
        with Live(console=console, auto_refresh=False) as live:
            async for s in _statuses(run, watch=True):
                if output == "json":
                    print(as_json(s), flush=True)
                else:
                    live.update(draw(s), refresh=True)

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    if watch:
        try:
            asyncio.run(again(console))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        return
    found = asyncio.run(once())
    if output == "json":
        print(as_json(found))
    else:
        console.print(draw(found))


async def _statuses(run: str, watch: bool) -> AsyncIterator[RunStatus]:
    """From the coordinator; if it is not running, once from the journal in the run directory."""
    from protomodels_cli.coordinator.run_dir import holds_a_run
    from protomodels_cli.errors import UserError
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

    folder = None if "://" in run else Path(run)
    if folder is not None and not holds_a_run(folder):
        raise UserError(f"{folder} is not a run directory", "name a run directory or a join link (pm://…)", "no_run")
    if folder is not None and not (folder / "link").exists():
        raise UserError(
            f"the coordinator of {folder} has not opened its port yet",
            f"look into {folder}/coordinator.log, or start the coordinator again",
            "no_link",
        )
    link = JoinLink.parse(run if folder is None else (folder / "link").read_text(encoding="utf-8"))
    try:
        async with operator(link) as coordinator:
            while True:
                s = await coordinator.status()
                yield s
                if not watch or s.phase == RunStatus.DONE:
                    return
                await asyncio.sleep(WATCH_SECONDS)
    except (UnreachableError, FingerprintError):  # the coordinator is gone, or another run has the port by now
        if folder is None:
            raise
        from protomodels_cli.coordinator.stopped import from_journal

        yield from_journal(folder)
