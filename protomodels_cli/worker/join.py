"""Joining a run: every check that can be made before a stage is asked for, each with its fix.

Knows the join link and this machine. It must not know stages: from the registration on, the session leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from protomodels_cli import PROTOCOL, __version__, timeouts
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.smallest import smallest_stage
from protomodels_cli.files import write_whole
from protomodels_cli.observe import logs
from protomodels_cli.retry import Backoff, retry
from protomodels_cli.spec.errors import SpecError
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.plugins import package_here
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.addresses import is_private, machine_id, own_addresses
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.channels import MOST_FROM_COORDINATOR, is_loopback
from protomodels_cli.wire.client import Metadata, Refused, coordinator_line, in_words
from protomodels_cli.wire.join_link import CrowdedError, JoinLink, UnreachableError, address, find_coordinator
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.port_mapping import Kept, NoMapping, mapped
from protomodels_cli.wire.relay import relay_trips
from protomodels_cli.wire.tls import MOST_SKEW, Identity, public_key_of
from protomodels_cli.wire.upnp import routers
from protomodels_cli.worker import device as devices
from protomodels_cli.worker import notices, problems
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.figures import Figures, shown_at
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.own_key import own_key
from protomodels_cli.worker.own_log import own_log
from protomodels_cli.worker.papers import Papers
from protomodels_cli.worker.power import limited, watched
from protomodels_cli.worker.resting import Hours, Wishes
from protomodels_cli.worker.session import Session
from protomodels_cli.worker.telling import PeerError, PeerTeller

KEPT_LINK, SHOWN, IN_USE = "link", "shown.json", "lock"  # in a peer's folder; several peers of a run may share one
EXPIRED = "certificate_expired"  # how the coordinator refuses a peer that it has not seen for so long


@dataclass(frozen=True)
class Options:
    """What `pmtrain join` was asked for. It must not know the run."""

    join_link: JoinLink
    devices: tuple[str, ...]  # over which its stage's layers are laid, in order
    name: str
    folder: Path  # where this peer keeps its files
    port: int  # for neighbours; 0: any
    give_up_after: float  # seconds without the coordinator
    listen: bool = True  # whether neighbours may dial it
    memory: int | None = None  # bytes it may use; None: all that is free
    metrics: str | None = None  # HOST:PORT for Prometheus; None: nowhere
    map_port: bool = False  # whether the router is asked to let neighbours in
    upload: float | None = None  # bits a second, of all that this peer sends; None: as much as its line carries
    download: float | None = None
    power: float | None = None  # watts that each of its cards may draw; None: as many as it does
    hours: Hours | None = None  # of the day in which it takes part; None: all


async def join(options: Options, say: Callable[[str], None]) -> int:
    """Join, take part until the run is over or we leave, and return the exit code. `say` is the terminal's.

    A coordinator that does not answer is a mistake in the link, unless this machine has been in its run before. A
    coordinator that has no room is asked again."""
    backoff, tell = Backoff(*timeouts.SESSION_RETRY, give_up_after=options.give_up_after), PeerTeller(say)
    figures = Figures()

    def heard(error: Exception) -> None:
        was_here = any(options.folder.glob(f"*-{options.join_link.fingerprint[:8]}"))
        if not (was_here or isinstance(error, CrowdedError)):
            raise error
        if backoff.failures == 1:
            tell(notices.CoordinatorUnreachable(str(error).splitlines()[0], options.give_up_after))

    try:
        with shown_at(options.metrics, figures):
            return await retry(partial(_stay, options, tell, figures), backoff, UnreachableError, heard)
    except UnreachableError as e:
        if backoff.failures > 1:
            raise PeerError(problems.GaveUp(options.give_up_after)) from e
        raise


async def _stay(options: Options, tell: PeerTeller, figures: Figures) -> int:
    """Take part, again after a sleep in which this peer's certificate has expired: if the token lets it in."""
    while True:
        try:
            return await _take_part(options, tell, figures)
        except Refused as e:
            if e.kind != EXPIRED:
                raise
            tell(notices.CertificateExpired())


async def _take_part(options: Options, tell: PeerTeller, figures: Figures) -> int:
    chosen = [devices.choose(name) for name in options.devices]
    link, authority = await find_coordinator(options.join_link)
    async with contextlib.AsyncExitStack() as closing:
        key = closing.enter_context(own_key(options.folder, link.fingerprint))
        cap = None
        if options.upload is not None or options.download is not None:
            cap = await closing.enter_async_context(Cap(options.upload, options.download))
        line = await closing.enter_async_context(coordinator_line(link, authority, MOST_FROM_COORDINATOR, cap))
        enrolled = await _enrol(line, options, key)
        spec = _check_spec(enrolled)
        _check_clock(enrolled.clock)
        folder = _check_disk(spec, options.folder / f"{spec.name}-{link.fingerprint[:8]}")
        logs.hide(enrolled.secret)
        files = closing.enter_context(own_log(folder, options.name))
        logs.to_file(files.log)
        closing.enter_context(tell.into(files.events))
        with contextlib.suppress(OSError):  # for `pmtrain top` and `runs` on this machine
            write_whole(folder / KEPT_LINK, f"{link}\n".encode(), 0o600)
            fcntl.flock(closing.enter_context((folder / IN_USE).open("a")), fcntl.LOCK_SH)
        try:
            not_compiled = await asyncio.to_thread(devices.try_compiling, spec, *chosen)
        except (RuntimeError, MemoryError) as e:
            raise devices.as_problem(e) from None
        if not_compiled is not None:
            tell(notices.NotCompiled(not_compiled))
        cards, computation = Cards.of(chosen, spec, options.memory), devices.computation_of(spec, *chosen)
        _check_memory(spec, cards, options.memory)
        host_memory = _check_host_memory(spec, cards)
        if options.memory is not None:
            cards.limit_memory()
        nvidia = tuple(card for card in cards.ids.split(",") if chosen[0].type == "cuda" and card)
        gpus = tuple(card if card.startswith("GPU-") else f"GPU-{card}" for card in nvidia)
        closing.enter_context(limited(gpus, options.power, tell))  # before its speed is measured
        if gpus:
            closing.enter_context(watched(gpus[0], figures))
        identity = Identity(key, enrolled.certificate_pem, authority)
        papers = Papers(identity, (("peer", enrolled.peer), ("secret", enrolled.secret)), folder / SHOWN)
        try:
            flops = await asyncio.to_thread(cards.measure_flops, spec)
        except RuntimeError as e:
            raise devices.as_problem(e) from None
        listener = Listener(identity)
        closing.push_async_callback(listener.stop)
        local_only = all(is_loopback(host) for host, _ in link.addresses) or not options.listen
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        await listener.start("127.0.0.1" if local_only else everywhere, options.port, cap)
        port = listener.port if options.listen else 0
        kept = None
        if options.map_port and not local_only:
            kept = await closing.enter_async_context(_mapping(port, tell))
        tell(notices.Joined(spec.name, options.name, enrolled.peer, cards.in_words, cards.offered, flops))
        if cap is not None:
            tell(notices.Capped(options.upload or 0.0, options.download or 0.0))
        known: notices.Reachable | notices.NotReachable | None = None

        async def introduce() -> pb.Register:
            """Describe this peer, again with every connection: both the coordinator and this machine may have moved."""
            nonlocal known
            own = [] if local_only else own_addresses()
            mapping = None if kept is None else kept.mapping
            outside = [] if mapping is None else [mapping.host]
            request = pb.ReachabilityRequest(port=port)
            if mapping is not None:
                request.outside_host, request.outside_port = mapping.host, mapping.port
            request.hosts.extend(host for host in dict.fromkeys([*own, *outside]) if not is_private(host))
            found, relays = await _reachability(line, papers.metadata, request, known)
            if options.listen and found != known:
                known = found
                tell(found)
            return pb.Register(
                spec_sha256=spec.sha256(),
                device=cards.in_words,
                memory=cards.offered,
                host_memory=host_memory,
                flops=flops,
                port=port,
                outside_port=request.outside_port,
                outside_host=request.outside_host,
                name=options.name,
                dtype=computation.dtype,
                compiled=computation.compiled,
                card=cards.ids,
                card_memory=cards.free,
                addresses=own,
                machine=machine_id(link.fingerprint) if options.listen else "",
                relay_trips=await relay_trips(relays),
                upload=options.upload or 0.0,
                download=options.download or 0.0,
            )

        session = Session(
            spec,
            cards,
            papers,
            listener,
            line,
            folder,
            tell,
            options.give_up_after,
            figures,
            cap,
            closing.enter_context(Wishes(folder, enrolled.peer, options.name, options.hours)),
        )
        return await session.run(introduce)


@contextlib.asynccontextmanager
async def _mapping(port: int, tell: PeerTeller) -> AsyncIterator[Kept | None]:
    """From the router, while the block lasts; None: it maps none, which is said."""
    async with contextlib.AsyncExitStack() as closing:
        kept = None
        try:
            lost = lambda why: tell(notices.PortNotMapped(port, why))  # noqa: E731
            kept = await closing.enter_async_context(mapped(routers(), port, lost))
            mapping = kept.mapping
            tell(notices.PortMapped(address(mapping.host, mapping.port), port, mapping.by))
        except NoMapping as why:
            tell(notices.PortNotMapped(port, str(why)))
        yield kept


async def _reachability(
    stub: rpc.PeeringStub,
    metadata: Metadata,
    request: pb.ReachabilityRequest,
    known: notices.Reachable | notices.NotReachable | None,
) -> tuple[notices.Reachable | notices.NotReachable, list[str]]:
    """Whether neighbours can dial this peer, as the coordinator finds it, and the run's relays. A firewall that
    swallows packets takes long to show; a run that waits for a peer to come back cannot wait for that: then a second
    has to do."""
    port, seconds = request.port, 30.0 if known is None else 1.0
    try:
        reach = await stub.CheckReachability(request, metadata=metadata, timeout=seconds)
    except grpc.aio.AioRpcError as e:
        if known is None or e.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return notices.NotReachable("this machine", port, "no answer within 1 s"), []
    relays = list(reach.relays)
    if reach.reachable:
        at = request.outside_port or port if reach.host == request.outside_host else port
        return notices.Reachable(address(reach.host, at)), relays
    return notices.NotReachable(reach.host, port, reach.reason), relays


async def _enrol(stub: rpc.PeeringStub, options: Options, key: bytes) -> pb.EnrolReply:
    request = pb.EnrolRequest(
        version=__version__,
        protocol=PROTOCOL,
        public_key_pem=public_key_of(key),
    )
    try:
        return await stub.Enrol(request, metadata=(("token", options.join_link.token),), timeout=30)
    except grpc.aio.AioRpcError as e:
        raise in_words(e, CrowdedError) from None  # the coordinator has just shown its certificate


def _check_spec(enrolled: pb.EnrolReply) -> RunSpec:
    """Both sides must read the spec alike, to the last default, and have the packages that the spec uses."""
    for point, theirs in sorted(enrolled.packages.items()):
        if (ours := package_here(point)) != theirs:
            raise PeerError(problems.OtherPackage(point, theirs, ours))
    try:
        spec = spec_from(json.loads(enrolled.spec_json))
    except SpecError as e:
        first = e.problems[0]
        raise PeerError(problems.SpecNotUnderstood(f"{first.field or 'the spec'}: {first.rule}")) from None
    except ValueError as e:
        raise PeerError(problems.SpecNotUnderstood(str(e))) from None
    if spec.sha256() != enrolled.spec_sha256:
        raise PeerError(problems.SpecReadDifferently())
    return spec


def _check_clock(coordinator: float) -> None:
    skew = time.time() - coordinator
    if abs(skew) > MOST_SKEW:
        raise PeerError(problems.ClockSkew(skew))


def _check_disk(spec: RunSpec, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as e:
        raise PeerError(problems.FolderNotWritable(str(folder), e.strerror or str(e))) from None
    free, need = shutil.disk_usage(folder).free, smallest_stage(spec, lambda m, first, end, _: m.saved(first, end))
    if free < need:
        raise PeerError(problems.DiskTooSmall(str(folder), free, need))
    return folder


def _check_memory(spec: RunSpec, cards: Cards, most: int | None) -> None:
    """`most`: what --memory allows, which is counted in `cards`."""

    def need_of(memory: StageMemory, first: int, end: int, after: int) -> int:
        on_device = memory.total(first, end, after, devices.computation_of(spec, *cards.devices))
        return on_device + (memory.on_host(first, end) if cards.host_memory is None else 0)

    need, whole = smallest_stage(spec, need_of), cards if most is None else Cards.of(cards.devices, spec)
    if whole.offered < need:
        raise PeerError(problems.DeviceTooSmall(cards.names, whole.offered, need))
    if most is not None and cards.offered < need:
        between = most - cards.offered  # what several cards cannot use
        raise PeerError(problems.MemoryOptionTooLow(cards.names, most, whole.free, need + between))


def _check_host_memory(spec: RunSpec, cards: Cards) -> int | None:
    free, need = cards.host_memory, smallest_stage(spec, lambda m, first, end, _: m.on_host(first, end))
    if free is not None and free < need:
        raise PeerError(problems.HostTooSmall(free, need))
    return free
