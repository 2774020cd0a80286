"""The identity of a snapshot's part to and from protobuf, and the status code for a part that is refused."""

from __future__ import annotations

import grpc

from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

REFUSED = grpc.StatusCode.OUT_OF_RANGE  # a part that cannot be its stage's: trying again does not help


def part_message(part: Part) -> pb.Part:
    return pb.Part(lineage=part.lineage, step=part.step, stage=part.stage, sha256=part.sha256)


def part_of(message: pb.Part) -> Part:
    return Part(message.lineage, message.step, message.stage, message.sha256)
