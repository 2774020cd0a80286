"""Joining a run: every check that can be made before a stage is asked for, each with its fix.

Knows the join link and this machine. It must not know stages: from the registration on, the session leads.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import torch

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.errors import UserError
from protomodels_cli.observe import logs
from protomodels_cli.quantities import rate, size
from protomodels_cli.retry import Backoff, retry
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.channels import MOST_FROM_COORDINATOR, is_loopback
from protomodels_cli.wire.client import Refused, coordinator_channel, in_words
from protomodels_cli.wire.join_link import JoinLink, UnreachableError, address, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import Identity, new_key, public_key_of
from protomodels_cli.worker import device as devices
from protomodels_cli.worker.control import GaveUp
from protomodels_cli.worker.links import Listener
from protomodels_cli.worker.session import Session

MOST_SKEW = 300.0  # seconds between the clocks; certificates have a day's grace, people who read logs have none


RETRY_SECONDS = 0.5, 5.0  # between tries to reach a coordinator that was there before: at first, at most
GIVE_UP_AFTER = 24 * 3600.0  # seconds: a coordinator that is back the next day finds its peers


@dataclass(frozen=True)
class Options:
    """What `pmtrain join` was asked for. It must not know the run."""

    join_link: JoinLink
    device: str
    name: str
    folder: Path  # where this peer keeps its files
    port: int  # for neighbours; 0: any
    listen: bool = True  # whether neighbours may dial it
    memory: int | None = None  # bytes it may use; None: all that is free
    give_up_after: float = GIVE_UP_AFTER  # seconds without the coordinator


async def join(options: Options, say: Callable[[str], None]) -> int:
    """Join, take part until the run is over or we leave, and return the exit code.

    A coordinator that does not answer is a mistake in the link, unless this machine has been in its run before."""
    backoff = Backoff(*RETRY_SECONDS, give_up_after=options.give_up_after)

    def heard(error: Exception) -> None:
        if not any(options.folder.glob(f"*-{options.join_link.fingerprint[:8]}")):
            raise error
        if backoff.failures == 1:
            say(f"{str(error).splitlines()[0]}; this machine was in its run before: trying until it is back …")

    try:
        return await retry(partial(_take_part, options, say), backoff, UnreachableError, heard)
    except UnreachableError as e:
        if backoff.failures > 1:
            raise GaveUp(options.give_up_after) from e
        raise


async def _take_part(options: Options, say: Callable[[str], None]) -> int:
    link = options.join_link
    device = devices.choose(options.device)
    authority = await fetch_authority(link)
    key = new_key()
    async with coordinator_channel(link, authority, MOST_FROM_COORDINATOR) as channel:
        stub = rpc.PeeringStub(channel)
        enrolled = await _enrol(stub, options, key)
        spec = _check_spec(enrolled)
        _check_clock(enrolled.clock)
        folder = _check_disk(spec, options.folder / f"{spec.name}-{link.fingerprint[:8]}")
        logs.hide(enrolled.secret)
        logs.to_file(folder / "peer.log")
        memory = _check_memory(spec, device, options.memory)
        identity = Identity(key, enrolled.certificate_pem, authority)
        flops = await asyncio.to_thread(devices.measure_flops, spec, device)
        listener = Listener(identity)
        local_only = is_loopback(link.host) or not options.listen
        await listener.start("127.0.0.1" if local_only else "0.0.0.0", options.port)
        try:
            credentials_of_peer = (("peer", enrolled.peer), ("secret", enrolled.secret))
            say(
                f"joined {spec.name} as {options.name} ({enrolled.peer}): {devices.in_words(device)}, "
                f"{size(memory)} free, {rate(flops, 'FLOP/s')}"
            )
            said = ""

            async def introduce() -> pb.Register:
                """Anew with every connection: the coordinator may have been started again, we may have moved."""
                nonlocal said
                if options.listen:
                    request = pb.ReachabilityRequest(port=listener.port)
                    # Who comes back is waited for, and a firewall that swallows packets takes long to show.
                    seconds = 1.0 if said else 30.0
                    try:
                        reach = await stub.CheckReachability(request, metadata=credentials_of_peer, timeout=seconds)
                    except grpc.aio.AioRpcError as e:
                        if not said or e.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                            raise
                        reach = pb.ReachabilityReply(reason="no answer within a second")
                    if (words := _reach_in_words(reach, listener.port)) != said:
                        said = words
                        say(words)
                return pb.Register(
                    spec_sha256=spec.sha256(),
                    device=devices.in_words(device),
                    memory=memory,
                    flops=flops,
                    port=listener.port,
                    name=options.name,
                )

            session = Session(
                spec,
                device,
                identity,
                listener,
                stub,
                credentials_of_peer,
                (link.host, link.port),
                folder,
                say,
                options.give_up_after,
            )
            return await session.run(introduce)
        finally:
            await listener.stop()


def _reach_in_words(reach: pb.ReachabilityReply, port: int) -> str:
    if reach.reachable:
        return f"neighbours can dial {address(reach.host, port)}"
    return (
        f"neighbours cannot dial this machine ({reach.reason}): its streams go through the coordinator, which is "
        f"slower. To be reachable, let TCP port {port} of {reach.host} in (in the router: forward it to this machine; "
        f"keep the port with --port {port})"
    )


async def _enrol(stub: rpc.PeeringStub, options: Options, key: bytes) -> pb.EnrolReply:
    request = pb.EnrolRequest(
        token=options.join_link.token,
        version=__version__,
        protocol=PROTOCOL,
        public_key_pem=public_key_of(key),
    )
    try:
        return await stub.Enrol(request, timeout=30)
    except grpc.aio.AioRpcError as e:
        raise in_words(e) from None


def _check_spec(enrolled: pb.EnrolReply) -> RunSpec:
    """Both sides must read the spec alike, to the last default."""
    try:
        spec = spec_from(json.loads(enrolled.spec_json))
    except (UserError, ValueError):
        spec = None
    if spec is None or spec.sha256() != enrolled.spec_sha256:
        raise Refused(
            "this pmtrain reads the run's spec differently from the coordinator's (their hashes differ)",
            "install the same version of pmtrain on both sides",
        )
    return spec


def _check_clock(coordinator: float) -> None:
    skew = time.time() - coordinator
    if abs(skew) > MOST_SKEW:
        side = "ahead of" if skew > 0 else "behind"
        raise Refused(
            f"this machine's clock is {abs(skew) / 60:.0f} minutes {side} the coordinator's",
            "set both clocks from the network (timedatectl set-ntp true)",
        )


def _check_disk(spec: RunSpec, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as e:
        raise UserError(f"{folder} cannot be written: {e.strerror}", "name another folder with --dir") from None
    free, need = shutil.disk_usage(folder).free, _least(spec, lambda m, first, end, after: m.kept(first, end))
    if free < need:
        raise UserError(
            f"{folder} has {size(free)} free, and a stage's snapshot may need {size(need)}",
            "free some, or name another folder with --dir",
        )
    return folder


def _least(spec: RunSpec, size_of: Callable[[StageMemory, int, int, int], int]) -> int:
    """The size of the smallest stage that this peer could be asked to hold."""
    sizes = StageMemory(spec)
    if spec.stages == "auto":
        return min(size_of(sizes, i, i + 1, 0) for i in range(spec.model.layers))
    ends = list(itertools.accumulate(layers_per_stage(spec)))
    starts = [0, *ends[:-1]]
    after = range(len(ends) - 1, -1, -1)
    return min(size_of(sizes, *stage) for stage in zip(starts, ends, after, strict=True))


def _check_memory(spec: RunSpec, device: torch.device, most: int | None) -> int:
    free, need = devices.free_memory(device), _least(spec, StageMemory.total)
    if free < need:
        raise UserError(
            f"the smallest stage needs {size(need)}, and {device} has {size(free)} free",
            "close other programs, use another device, or ask the run's owner for more stages",
        )
    if most is not None and most < need:
        enough = math.ceil(need / 2**30 * 1000) / 1000
        raise UserError(
            f"the smallest stage needs {size(need)}, and --memory allows {size(most)} of {size(free)} free on {device}",
            f"allow --memory {enough:g} or more, or ask the run's owner for more stages",
        )
    return free if most is None else min(free, most)
