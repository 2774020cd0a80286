"""`pmtrain relay`: pass bytes on between peers that cannot dial each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.amounts import bits_of
from protomodels_cli.cli.log_options import LogLevelOption, Verbose
from protomodels_cli.cli.say import say
from protomodels_cli.errors import EXIT_INTERRUPTED, UserError
from protomodels_cli.observe import logs

DEFAULT_PORT = 7430


def relay(
    host: Annotated[
        str | None, typer.Option(help="Name or address of this machine, as peers reach it. Default: detected.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: any free one.")] = DEFAULT_PORT,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder of its secret and its books. Default: pmtrain/relay in $XDG_DATA_HOME."),
    ] = None,
    run_limit: Annotated[
        str,
        typer.Option(
            "--run-limit", "--run-mbit", metavar="RATE", help="Most that a run may send through it, as 50mbit."
        ),
    ] = "none",
    peer_limit: Annotated[
        str,
        typer.Option("--peer-limit", "--peer-mbit", metavar="RATE", help="Most that a peer may send, as 5mbit."),
    ] = "none",
    verbose: Verbose = False,
    log_level: LogLevelOption = None,
) -> None:
    """Relay for runs whose owners have this relay's link: peers that cannot dial each other meet here.

    It sees ciphertext alone. Needs no GPU, no torch, and one TCP port that is let in."""
    import asyncio

    from protomodels_cli.files import relay_home
    from protomodels_cli.wire.channels import own_address
    from protomodels_cli.wire.relaying import RelayLimits

    logs.begin(log_level, verbose)
    limits = RelayLimits(
        bits_per_run=bits_of(run_limit, "--run-limit"), bits_per_peer=bits_of(peer_limit, "--peer-limit")
    )
    asyncio.run(_relay(host or own_address(), port, folder or relay_home(), limits))
    raise typer.Exit(EXIT_INTERRUPTED)


async def _relay(host: str, port: int, folder: Path, limits: object) -> None:
    import asyncio
    import signal

    from protomodels_cli.files import write_whole
    from protomodels_cli.wire.channels import bind_address
    from protomodels_cli.wire.join_link import address
    from protomodels_cli.wire.relaying import Relay, RelayLimits
    from protomodels_cli.wire.tickets import RelayLink, kept_secret

    assert isinstance(limits, RelayLimits)
    folder.mkdir(parents=True, exist_ok=True)
    secret = kept_secret(folder)
    logs.hide(secret)
    serving = Relay(secret, limits)
    bind = bind_address(host)
    try:
        port = await serving.open(bind, port)
    except OSError as error:
        what = f"cannot listen on {address(bind, port)}: {error.strerror or error}"
        raise UserError(what, "choose another --port, or stop the program that uses it", "cannot_listen") from None
    link = RelayLink(host, port, secret)
    write_whole(folder / "link", f"{link}\n".encode(), 0o600)
    say(f"relaying at {link.address}; a coordinator uses it with:\n\n    pmtrain coordinator … --relay '{link}'\n")
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    books = asyncio.create_task(serving.keep_books(folder))
    try:
        await over.wait()
    finally:
        books.cancel()
        await serving.close()
        serving.write_books(folder)
