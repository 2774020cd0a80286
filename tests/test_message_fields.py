"""Every field of what peers send has a rule, and what breaks it is named."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from conftest import make_spec
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protomodels_cli.coordinator.message_fields import FIELDS, check
from protomodels_cli.coordinator.messages import event_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

SPEC = make_spec(stages=2)
NAN, INF, SUBNORMAL = math.nan, math.inf, 5e-324


def messages_in(one: Descriptor) -> Iterator[Descriptor]:
    yield one
    for field in one.fields:
        if field.message_type is not None:
            yield from messages_in(field.message_type)


def test_every_field_of_every_message_has_a_rule_and_no_other_field_has():
    found = {
        message.name: {field.name for field in message.fields if field.type != FieldDescriptor.TYPE_MESSAGE}
        for message in messages_in(pb.PeerMessage.DESCRIPTOR)
    }
    assert {name: fields for name, fields in found.items() if fields} == {k: {*v} for k, v in FIELDS.items()}


def usage(**fields: float) -> pb.PeerMessage:
    return pb.PeerMessage(done=pb.Done(usage=pb.Usage(**fields)))


def verdict(**fields: int) -> pb.PeerMessage:
    return pb.PeerMessage(verdict=pb.Verdict(compared=[pb.Comparison(**fields)]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        *((usage(compute_s=value), "done.usage.compute_s") for value in (SUBNORMAL, -1.0, NAN, INF, 1e300)),
        *((usage(wait_s=value), "done.usage.wait_s") for value in (-SUBNORMAL, NAN, INF, 1e300)),
        (usage(grown_forward=-1.0), "done.usage.grown_forward"),
        (usage(forward_bytes=2**64 - 1), "done.usage.forward_bytes"),
        (pb.PeerMessage(done=pb.Done(norms=[pb.UnitNorm(unit="head", squared=-SUBNORMAL)])), "done.norms.squared"),
        (pb.PeerMessage(done=pb.Done(recorded=pb.Recorded(forward_in=[b"x"]))), "done.recorded.forward_in"),
        (pb.PeerMessage(done=pb.Done(basis_sha256="u0")), "done.basis_sha256"),
        (pb.PeerMessage(register=pb.Register(flops=SUBNORMAL)), "register.flops"),
        (pb.PeerMessage(register=pb.Register(port=70000)), "register.port"),
        (
            pb.PeerMessage(register=pb.Register(upload=1.0)),
            "register.upload",
        ),  # its parts would be waited for for weeks
        (pb.PeerMessage(register=pb.Register(download=999_999.0)), "register.download"),
        (pb.PeerMessage(rest=pb.Rest(until=3e11)), "rest.until"),  # no calendar has that year
        (pb.PeerMessage(register=pb.Register(rest=pb.Rest(until=3e11))), "register.rest.until"),
        (pb.PeerMessage(register=pb.Register(holding=pb.Holding(layers_per_stage=[0]))), "register.holding.layers"),
        (pb.PeerMessage(prefetched=pb.Part(stage=4)), "prefetched.stage"),
        (pb.PeerMessage(trouble=pb.Trouble(about=2**32 - 1)), "trouble.about"),
        (verdict(leg=1, numbers=2**60), "verdict.compared.numbers"),
        (verdict(numbers=1), "verdict.compared.leg"),
    ],
)
def test_a_field_that_breaks_its_rule_is_named(message: pb.PeerMessage, field: str):
    with pytest.raises(ValueError, match=f"^{field}"):
        event_of("p0", message, SPEC)


def test_a_run_that_diverges_is_no_mistake():
    norms = [pb.UnitNorm(unit="head", squared=value) for value in (0.0, INF, NAN)]
    for loss in (NAN, INF, -INF):
        check(pb.PeerMessage(done=pb.Done(norms=norms, loss_sum=loss, usage=pb.Usage(grown_forward=INF))), SPEC)
