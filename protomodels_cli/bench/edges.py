"""Messages of a peer at the edges of every field: zero, negative, tiny, huge, no number, absent, of another step, stage
or generation. For the live fuzzer.

Knows the messages and what the coordinator has told a peer. It must not know what follows from them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protomodels_cli.coordinator.message_fields import EDGES, FIELDS, MOST
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

FLOATS = [0.0, -0.0, -1.0, 5e-324, -5e-324, 1e-300, 1e-9, 0.5, 1.0, 1e11, 1e300, 1.8e308]
FLOATS += [float("inf"), float("-inf"), float("nan"), *EDGES]
TEXTS = ["", "x", "a" * 64, "0" * 63, "\x00\n", "é" * 300, "bf16", "embed", "layers.0", *troubles.KINDS]
CONTENTS = [b"", b"x", bytes(32), bytes(1000)]
FILLED = 0.5  # of the fields of a message
# The share of messages with fields that may break their rules: each of them is the end of its sender.
OUT_OF_RANGE = 0.05
BODIES = [one.name for one in pb.PeerMessage.DESCRIPTOR.fields if one.name not in ("register", "leaving", "heartbeat")]


@dataclass
class Heard:
    """What the coordinator has told the peer of the run."""

    generation: int = 1
    task: int = 1
    step: int = 1
    lineage: int = 1
    hashes: tuple[str, ...] = ()  # of parts

    def hear(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "assignment":
                told = message.assignment
                self.generation, self.task, self.step, self.lineage = (
                    told.generation,
                    told.task,
                    told.step,
                    told.lineage,
                )
            case "turn":
                self.generation, self.task = message.turn.generation, message.turn.task
                self.step = message.turn.step.step or self.step
            case "keep":
                self.hashes = tuple(part.sha256 for part in message.keep.newest)
                for part in message.keep.newest:
                    self.lineage, self.step = part.lineage, part.step
            case _:
                pass


class Edges:
    def __init__(self, draw: random.Random, spec: RunSpec):
        self._draw, self._spec, self._any = draw, spec, False

    def message(self, heard: Heard) -> pb.PeerMessage:
        message, self._any = pb.PeerMessage(), self._draw.random() < OUT_OF_RANGE
        body = getattr(message, self._draw.choice(BODIES))
        body.SetInParent()
        self._fill(body, heard)
        return message

    def _fill(self, message: Message, heard: Heard) -> None:
        rules = FIELDS.get(message.DESCRIPTOR.name, {})
        for field in message.DESCRIPTOR.fields:
            if self._draw.random() >= FILLED:
                continue
            many = self._draw.choice([0, 1, 2, 4]) if field.is_repeated else 1
            if field.message_type is not None:
                for _ in range(many):
                    inner = getattr(message, field.name)
                    inner = inner.add() if field.is_repeated else inner
                    inner.SetInParent()
                    self._fill(inner, heard)
            else:
                values = [self._value(field, heard) for _ in range(many)]
                rule = rules.get(field.name)
                if not (self._any or rule is None):
                    values = [value for value in values if rule.holds(value, self._spec)]
                if field.is_repeated:
                    getattr(message, field.name).extend(values)
                elif values:
                    setattr(message, field.name, values[0])

    def _value(self, field: Any, heard: Heard) -> Any:
        draw = self._draw
        if field.name in vars(heard) and draw.random() < 0.7:
            return getattr(heard, field.name)
        if field.name.endswith("sha256") and heard.hashes and draw.random() < 0.5:
            return draw.choice(heard.hashes)
        match field.type:
            case FieldDescriptor.TYPE_DOUBLE:
                return draw.choice(FLOATS)
            case FieldDescriptor.TYPE_UINT32:
                return draw.choice(_integers(2**32 - 1, heard))
            case FieldDescriptor.TYPE_UINT64:
                return draw.choice(_integers(2**64 - 1, heard))
            case FieldDescriptor.TYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.TYPE_ENUM:
                return draw.choice([0, 1, 2, 7])
            case FieldDescriptor.TYPE_BYTES:
                return draw.choice(CONTENTS)
            case FieldDescriptor.TYPE_STRING:
                return draw.choice(TEXTS)
        raise AssertionError(f"{field.full_name} has a type that the fuzzer does not know")


def _integers(largest: int, heard: Heard) -> list[int]:
    near = (heard.generation, heard.task, heard.step, heard.lineage)
    return [
        0,
        1,
        2,
        3,
        5,
        largest,
        largest // 2 + 1,
        min(largest, MOST),
        *(n + d for n in near for d in (-1, 0, 1) if 0 <= n + d <= largest),
    ]
