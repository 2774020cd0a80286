"""What a call brings along beside its message, and how one is ended that is not answered."""

from __future__ import annotations

import re

import grpc

from protomodels_cli.coordinator import bad_requests, refusals
from protomodels_cli.coordinator.refusal_sentences import refusal
from protomodels_cli.observe import logs

DENIED, UNFIT = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
BUSY = grpc.StatusCode.RESOURCE_EXHAUSTED  # the caller may try again


async def refuse(context: grpc.aio.ServicerContext, reason: refusals.Refusal) -> None:
    """End the call. The caller's program reads the kind, and shows the sentence."""
    logs.seldom(logs.WIRE, "refused a call: %s", reason.kind)
    code = DENIED if isinstance(reason, refusals.Denial) else BUSY if isinstance(reason, refusals.Crowd) else UNFIT
    await context.abort(code, "\n".join(refusal(reason)), trailing_metadata=(("kind", reason.kind),))


async def reject(context: grpc.aio.ServicerContext, reason: bad_requests.Reason) -> None:
    """End a call that no peer of this version makes."""
    logs.seldom(logs.WIRE, "rejected a request: %s", bad_requests.sentence(reason), kind=reason.kind)
    metadata = (("kind", reason.kind),)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, bad_requests.sentence(reason), trailing_metadata=metadata)


def port(context: grpc.aio.ServicerContext) -> int:
    """Of loopback, from which gRPC sees the call come."""
    found = re.search(r":(\d+)$", context.peer())
    return int(found[1]) if found else 0


def was_busy(context: grpc.aio.ServicerContext) -> bool:
    """Whether the call was refused since there were too many, not for anything that it said."""
    return context.code() in (BUSY, BUSY.value[0])  # gRPC's server has the number alone


def metadata(context: grpc.aio.ServicerContext, name: str) -> str:
    """The value of a call's metadata under this name; empty if there is none."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))
