"""`pmtrain coordinator SPEC`: lead a run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from protomodels_cli.cli.beginning import Beginning
from protomodels_cli.cli.completing import spec_files
from protomodels_cli.cli.heap import use_one_arena
from protomodels_cli.cli.log_options import LogLevelOption, Verbose
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.observe import logs

if TYPE_CHECKING:
    from protomodels_cli.observe.notify import Target
    from protomodels_cli.observe.page.address import Where
    from protomodels_cli.wire.join_link import Address
    from protomodels_cli.wire.tickets import RelayLink

DEFAULT_PORT = 7420
MOST_INHERITED = 3  # addresses of earlier coordinators that a link goes on naming, unless --also-at says which
# When Python looks for garbage in cycles: objects, times among the youngest, times among those that survived once. Of
# such garbage there are some ten objects a second; at Python's own 700, 10, 10 the objects of a thousand sessions are
# looked through three times a second, and each time a decision waits for 5 to 200 ms.
GARBAGE = 10_000, 5, 5


def coordinator(
    spec_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SPEC]",
            help="The run's spec; optional with --resume or --rebuild.",
            autocompletion=spec_files,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Name or address of this machine in the join link. Default: detected.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"The one public TCP port; 0: any free one. Default: {DEFAULT_PORT}."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            "--run-dir",
            help="The run directory. Default: runs/NAME, or the next free one of runs/NAME-2, runs/NAME-3, …",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run; never start a new one.")] = False,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="For a lost or damaged journal: make a new one from the newest complete snapshot in --dir (if "
            "there is none, start again at step 1), then continue.",
        ),
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Continue a run whose coordinator is lost: from the store that snapshots.copy_to names, in a new "
            "run directory.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The key under which the store has the run's secrets. Default: $PMTRAIN_STORE_KEY; a new run makes "
            "its own.",
        ),
    ] = None,
    also_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Another address for the join link, where peers look for a coordinator if this one is lost. May be "
            "repeated.",
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK",
            help="Let peers that cannot dial each other meet at this relay: what `pmtrain relay` printed, or a file "
            "that has it. May be repeated. Default: as at the last start.",
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Show the run's web page to others there, with a viewing key. Default: on this machine alone, at port "
            "7421 or the next free one.",
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="No web page and no /metrics.")] = False,
    page_sample: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT",
            help="Show how the newest snapshot continues this text on the page; needs torch here. Default: as at the "
            "last start; an empty text shows none.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Tell the owner elsewhere when the run ends, stands still, or has no spare left: an ntfy topic, a "
            "Discord webhook, or 'exec:COMMAND'. Default: as at the last start; '': nobody.",
        ),
    ] = None,
    verbose: Verbose = False,
    log_level: LogLevelOption = None,
) -> None:
    """Lead a run: assign stages, grant steps, journal every decision. Needs no GPU and no torch.

    Run the same command again to continue a run that was interrupted."""
    gc.disable()  # what is imported stays: looking for garbage among it is a tenth of a restart's time
    from protomodels_cli.spec import load_spec

    if store is not None and (resume or rebuild):
        fix = "leave out --resume and --rebuild: they are for a run directory that is still there"
        raise OptionError(f"--from {store} makes a new run directory", fix, "from_with_resume")
    if rebuild and run_dir is None:
        raise OptionError("--rebuild needs a run directory", "name the run directory with --dir", "no_run_dir")
    resume = resume or rebuild
    if spec_file is None and store is None and not (resume and run_dir):
        raise OptionError("SPEC is missing", "name a spec file, or use --resume with --dir", "no_spec")
    spec = None if spec_file is None else load_spec(spec_file)
    others = _addresses(also_at or [])
    if relay is not None:
        _relay_links(relay)
    logs.begin(log_level, verbose)
    beginning = Beginning()
    beginning.handle_signals()

    import asyncio

    from protomodels_cli.cli.folders import claim_or_find
    from protomodels_cli.cli.prepared import prepared
    from protomodels_cli.coordinator.coordinator import Coordinator
    from protomodels_cli.coordinator.run_dir import holds_a_run, open_run_dir
    from protomodels_cli.coordinator.seal import given_key
    from protomodels_cli.coordinator.snapshots.room import check_room
    from protomodels_cli.wire.channels import bind_address, own_address

    with beginning:
        where = _place_of_page(page, no_page, page_sample)
        told = _target(notify)
        use_one_arena()
        gc.freeze()
        gc.set_threshold(*GARBAGE)
        gc.enable()
        base, given = Path() if spec_file is None else spec_file.parent, given_key(key)
        if store is not None:
            from protomodels_cli.cli.taking_over import taken_over

            folder, before = taken_over(store, given, run_dir, spec, None if spec_file is None else base)
        else:
            path = claim_or_find(run_dir, spec, beginning)
            if resume and not holds_a_run(path):
                raise UserError(f"{path} holds no run to continue", "name the run directory with --dir", "no_run")
            folder = open_run_dir(path, spec, base, rebuild, given)
            before = folder.addresses() if folder.resumed else ()
        logs.hide(folder.token, folder.owner)
        logs.to_file(folder.path / "coordinator.log")
        if not folder.resumed:  # before the data, which may take hours
            check_room(folder.spec, folder.path)
        public, number = host or own_address(), DEFAULT_PORT if port is None else port
        if store is None and before:  # where its peers look for it
            public, number = host or before[0][0], port or before[0][1]
            before = before[1:]
        _try_port(bind_address(public), number)
        relays, sample = _relays(relay, folder.path), _sample(page_sample, where, folder.path)
        corpus = prepared(folder.spec, folder.base, apart=True)
        if store is not None:
            from protomodels_cli.data.kept import check

            check(corpus, folder.path)

        inherited = before[:MOST_INHERITED]

        def announce(link: str) -> None:
            say(f"run directory: {folder.path}\nothers join with:\n\n    pmtrain join '{link}'\n")
            say(f"for friends without pmtrain: `pmtrain invite {folder.path}` prints how to install it and join")
            if where is not None:
                from protomodels_cli.coordinator.watching import links_of, write_links

                links = links_of(where, folder)
                write_links(links, folder)
                say(f"watch it on this machine:  {links.owner}")
                if links.viewing:
                    say(f"others may watch it at:    {links.viewing}")

        told = _kept_target(notify, told, folder.path)

        async def lead() -> int:
            leading = Coordinator(corpus, folder, say, others or inherited, relays=relays)
            if where is not None:
                leading.watch(where, sample)
            if told is not None:
                leading.notify(told)
            return await leading.run(bind_address(public), public, number, announce)

        code = asyncio.run(lead())
        if code == 0 and (folder.path / "summary.json").exists():
            from protomodels_cli.cli.summary import in_words, read_summary

            say(in_words(read_summary(folder.path)))
        raise typer.Exit(code)


def _place_of_page(page: str | None, no_page: bool, sample: str | None) -> Where | None:
    from protomodels_cli.observe.page.address import asked_place, default_place

    if no_page:
        if page is not None or sample is not None:
            other = "--page" if page is not None else "--page-sample"
            raise OptionError(f"--no-page {other}: one asks for the page that the other forbids", "use one", "page")
        return None
    return default_place() if page is None else asked_place(page)


def _target(text: str | None) -> Target | None:
    from protomodels_cli.observe.notify import parse_target

    return parse_target(text) if text else None


def _kept_target(text: str | None, target: Target | None, folder: Path) -> Target | None:
    """As given now, or at the last start: the URL is a secret, and in the run directory."""
    from protomodels_cli.files import write_whole

    kept = folder / "notify"
    if text is not None:
        if target is None:
            kept.unlink(missing_ok=True)
        else:
            write_whole(kept, text.encode(), 0o600)
    elif kept.exists():
        text = kept.read_text(encoding="utf-8").strip()
        target = _target(text)
    if target is not None and target.kind != "command":
        logs.hide(target.address, urlsplit(target.address).path.strip("/"))
    return target


def _relays(texts: list[str] | None, folder: Path) -> list[RelayLink]:
    """As given now, or at the last start: their secrets are in the run directory."""
    from protomodels_cli.coordinator.routes import MOST_RELAYS
    from protomodels_cli.files import write_whole

    kept = folder / "relays"
    found = _relay_links(texts if texts is not None else [str(kept)] if kept.exists() else [])
    if len(found) > MOST_RELAYS:
        raise OptionError(f"--relay names {len(found)} relays, {MOST_RELAYS} at most", "name fewer", "relay")
    logs.hide(*(link.secret for link in found))
    if texts is not None:
        write_whole(kept, "".join(f"{link}\n" for link in found).encode(), 0o600)
    return found


def _relay_links(texts: list[str]) -> list[RelayLink]:
    from protomodels_cli.wire.join_link import LinkError
    from protomodels_cli.wire.tickets import relay_links

    try:
        return relay_links(texts)
    except LinkError as e:
        fix = "copy the whole link from what `pmtrain relay` printed, or name a file that has it"
        raise OptionError("--relay: must be pmr://HOST:PORT/SECRET, or a file of such lines", fix, "relay") from e


def _try_port(bind: str, port: int) -> None:
    """Before the data, which may take hours. A port that a run of this machine has is named by it."""
    from protomodels_cli.cli import on_disk
    from protomodels_cli.coordinator.door import try_port

    try:
        try_port(bind, port)
    except UserError as e:
        led = next((one.path for one in on_disk.everything() if on_disk.port_of(one) == port), None)
        if e.kind != "port_taken" or led is None:
            raise
        fix = f"stop that run (`pmtrain stop {led}`), or choose another --port, such as {port + 10}"
        raise UserError(f"the run in {led} uses port {port}", fix, e.kind) from None


def _sample(asked: str | None, where: Where | None, folder: Path) -> str | None:
    """The prompt for the page: as given now, or at the last start; an empty one shows none any more."""
    from protomodels_cli.coordinator.file_names import PAGE_SAMPLE
    from protomodels_cli.files import write_whole

    kept = folder / PAGE_SAMPLE
    if asked is not None:
        write_whole(kept, asked.encode(), 0o600)
    elif kept.exists():
        asked = kept.read_text(encoding="utf-8")
    return asked or None if where is not None else None


def _addresses(texts: list[str]) -> list[Address]:
    from protomodels_cli.wire.join_link import MOST_ADDRESSES, LinkError, parse_address

    found: list[Address] = []
    for text in texts:
        try:
            found.append(parse_address(text))
        except LinkError:
            fix = "write for example 203.0.113.9:7420, and an IPv6 address in brackets"
            raise OptionError(f"--also-at {text}: must be HOST:PORT", fix, "also_at") from None
    if len(found) >= MOST_ADDRESSES:
        what = f"--also-at is given {len(found)} times, and a join link names {MOST_ADDRESSES} addresses at most"
        raise OptionError(what, "name fewer", "also_at")
    return found
