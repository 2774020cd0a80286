"""`pmtrain join LINK`: take part in a run."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protomodels_cli.cli.amounts import memory_of, seconds_of
from protomodels_cli.cli.devices import DeviceOption, device_named
from protomodels_cli.cli.interrupt import leave_on_ctrl_c
from protomodels_cli.cli.log_options import LogLevelOption, Verbose
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError
from protomodels_cli.files import peer_home
from protomodels_cli.observe import logs

if TYPE_CHECKING:
    from protomodels_cli.wire.join_link import JoinLink


def join(
    link: Annotated[
        str,
        typer.Argument(
            metavar="LINK",
            envvar="PMTRAIN_LINK",
            help="The join link that the coordinator printed: pm://…, or a file with it.",
        ),
    ],
    device: DeviceOption = "auto",
    devices: Annotated[
        str | None,
        typer.Option(help="GPUs to lay the stage's layers over, in order, as 0,1; --memory is then for all."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this peer in messages. Default: this machine's name.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port for links from neighbours; 0: any free one.")
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most device memory to use, as 11gib; torch refuses more. Default: all free."
        ),
    ] = None,
    listen: Annotated[
        bool, typer.Option("--listen/--no-listen", help="Whether neighbours may connect to this machine directly.")
    ] = True,
    map_port: Annotated[
        bool,
        typer.Option("--map-port", help="Ask the router (NAT-PMP, UPnP) to let neighbours in, until this peer ends."),
    ] = False,
    upload: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Most that this peer may send, all in all, as 10mbit. Default: no cap."),
    ] = None,
    download: Annotated[
        str | None, typer.Option(metavar="RATE", help="Most that it may receive. Default: no cap.")
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(min=1, metavar="WATTS", help="Most that each card may draw, by nvidia-smi. Default: no limit."),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(metavar="FROM-TO", help="Hours of the day to take part in, as 22:00-07:00. Default: all."),
    ] = None,
    give_up_after: Annotated[
        str,
        typer.Option(metavar="TIME", help="Leave after this time without reaching the coordinator, as 8h or 20min."),
    ] = "24h",
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for this peer's files. Default: pmtrain/peers in $XDG_DATA_HOME."),
    ] = None,
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="Whether to check this machine first, as doctor does.")
    ] = True,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Show this peer's figures to Prometheus there.")
    ] = None,
    verbose: Verbose = False,
    log_level: LogLevelOption = None,
) -> None:
    """Join a run: hold one of its stages, on one device or over several, until the run is done.

    Ctrl-C leaves after the current step, or at once if the coordinator cannot be reached."""
    from protomodels_cli.wire.cap import parse_cap
    from protomodels_cli.wire.join_link import read_link
    from protomodels_cli.worker.resting import Hours

    if map_port and not listen:
        what = "--map-port --no-listen: one asks to be dialled from outside, the other not to be dialled"
        raise OptionError(what, "leave one of the two out", "map_port")
    sends, receives = parse_cap("upload", upload), parse_cap("download", download)
    daily = None if hours is None else Hours.parse(hours)
    names, parsed = _devices(device, devices), read_link(link)
    limit, patience = memory_of(memory), seconds_of(give_up_after, "--give-up-after")
    assert patience is not None
    leave_on_ctrl_c()
    logs.begin(log_level, verbose)
    logs.hide(parsed.token)
    print(f"joining {parsed.host}:{parsed.port} …", flush=True)
    # Before torch is imported: without gaps between blocks of memory, a stage fits where its bytes do.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    import asyncio

    own = folder or peer_home(parsed.fingerprint[:8])
    if preflight:
        asyncio.run(_check_link(parsed, own))

        from protomodels_cli.cli.run_doctor import check_first

        check_first(own, names[0])

    from protomodels_cli.worker.join import Options
    from protomodels_cli.worker.join import join as take_part

    options = Options(
        parsed,
        names,
        name or socket.gethostname(),
        own,
        port,
        patience,
        listen,
        limit,
        metrics,
        map_port,
        sends,
        receives,
        power,
        daily,
    )

    raise typer.Exit(asyncio.run(take_part(options, say)))


async def _check_link(link: JoinLink, own: Path) -> None:
    """Raises UserError where the link lets nobody in: before torch is imported, and the device is measured.

    A coordinator that is away or has no room is asked again later, where this machine was in its run before."""
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import CrowdedError, UnreachableError

    try:
        async with operator(link) as coordinator:
            await coordinator.status()
    except UnreachableError as e:
        was_here = any(own.glob(f"*-{link.fingerprint[:8]}"))
        if not (was_here or isinstance(e, CrowdedError)):
            raise


def _devices(one: str, several: str | None) -> tuple[str, ...]:
    if several is None:
        return (device_named(one),)
    if one != "auto":
        raise OptionError(
            f"--device {one} --devices {several}: both say where to compute", "use one of the two", "devices"
        )
    if not re.fullmatch(r"(cuda:)?\d+(,(cuda:)?\d+)*|cpu(,cpu)*", several):
        raise OptionError(
            f"--devices {several}: must be GPUs, or the CPU several times, separated by commas",
            "write for example 0,1",
            "devices",
        )
    return tuple(f"cuda:{name}" if name.isdigit() else name for name in several.split(","))
