"""`pmtrain status` and `pmtrain peers`: how a run is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protomodels_cli.cli.output import Format, FormatOption, print_json
from protomodels_cli.cli.place import RunArgument, place_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus


def status(run: RunArgument = None, output: FormatOption = "text") -> None:
    """Show what a run is doing and what it is waiting for. `pmtrain top` shows it live."""
    from protomodels_cli.observe.view import picture

    _show(run, output, picture, None)


def peers(run: RunArgument = None, output: FormatOption = "text") -> None:
    """List the peers of a run."""
    from protomodels_cli.observe.view import peer_table

    _show(run, output, peer_table, "peers")


def _show(run: str | None, output: Format, draw: Callable[[RunStatus], RenderableType], part: str | None) -> None:
    import asyncio

    from protomodels_cli.cli.asking import status_of

    place = place_of(run)
    found = asyncio.run(status_of(place))
    if output == "json":
        from protomodels_cli.observe.fields import fields

        all_of_it = fields(found)
        print_json({part: all_of_it[part]} if part else all_of_it)
        return
    from protomodels_cli.observe.screen import plain_console

    plain_console().print(draw(found))
