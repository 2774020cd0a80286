"""Messages over a boundary, cut into frames and put together again. Pure: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from protomodels_cli.protocol.messages import BadMessage, Leg
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

LEG_NUMBERS: dict[Leg, pb.Frame.Leg] = {
    "forward": pb.Frame.FORWARD,
    "backward": pb.Frame.BACKWARD,
    "evaluation": pb.Frame.EVALUATION,
}
_NAMES = {number: name for name, number in LEG_NUMBERS.items()}
Allocate = Callable[[int], memoryview]
# Bytes of a message's payload that one frame carries. Behind one the next word waits: over 0.5 Mbit/s that is 4 s, and
# a link over which nothing comes for longer is taken for dead.
PIECE = 256 << 10
_SIZE = 4  # bytes in which a frame says how long its fields are


@dataclass(frozen=True)
class Message:
    """One microbatch's activations or gradients, packed, or (on the first stage) its token ids alone."""

    leg: Leg
    step: int
    microbatch: int
    basis_version: int
    ids: bytes
    payload: bytes | memoryview | None  # None is poison: the numbers were not finite


@dataclass(frozen=True)
class Frame:
    """A piece of a message and what it is. As bytes: the size of the fields, the fields, the payload as it is, which
    protobuf would copy each time that it is asked for it or for its own size."""

    fields: pb.Frame
    payload: bytes | memoryview = b""

    @property
    def size(self) -> int:
        return _SIZE + self.fields.ByteSize() + len(self.payload)

    def to_bytes(self) -> bytes:
        fields = self.fields.SerializeToString()
        return b"".join((len(fields).to_bytes(_SIZE, "little"), fields, self.payload))

    @classmethod
    def from_bytes(cls, content: bytes) -> Frame:
        end = _SIZE + int.from_bytes(content[:_SIZE], "little")
        try:
            fields = pb.Frame.FromString(content[_SIZE:end])
        except DecodeError:
            end = len(content) + 1
        if end > len(content):
            raise BadMessage("what arrived is no frame", kind="no_frame")
        return cls(fields, memoryview(content)[end:])


def frames_of(message: Message, generation: int) -> Iterator[Frame]:
    payload = memoryview(message.payload or b"")
    for start in range(0, max(1, len(payload)), PIECE):
        fields = pb.Frame(
            leg=LEG_NUMBERS[message.leg],
            generation=generation,
            step=message.step,
            microbatch=message.microbatch,
            basis_version=message.basis_version,
            ids=message.ids if start == 0 else b"",
            poison=message.payload is None,
            size=len(payload),
        )
        yield Frame(fields, payload[start : start + PIECE])


def ordinary_memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data


class Assembler:
    """Frames of one link, in order, back to messages. Refuses what cannot be part of a whole one."""

    def __init__(
        self,
        most_bytes: int,
        legs: Collection[Leg],
        check_credit: Callable[[], None] = lambda: None,
        allocate: Allocate = ordinary_memory,
    ):
        """`legs`: what may come in. `check_credit`: raises where no message may begin. `allocate`: where a message of
        several frames is put together."""
        self.most_bytes, self._legs = most_bytes, legs
        self._check_credit, self._allocate = check_credit, allocate
        self._first: pb.Frame | None = None  # of the message under way
        self._payload = memoryview(b"")  # its pieces, each copied when it comes: all at once would hold up the loop
        self._came = 0

    def reset(self) -> None:
        """Forget the pieces of a message that will come again, from its beginning."""
        self._first, self._came = None, 0

    def add(self, frame: Frame) -> Message | None:
        """The message that this frame completes, if it does."""
        fields, piece = frame.fields, frame.payload
        first = self._first or self._begin(fields)
        if self._first is not None and (_key(fields) != _key(first) or fields.ids):
            raise BadMessage("a frame interrupts another message", kind="frame_out_of_order")
        if first.size and not piece:
            raise BadMessage("a frame of a longer message is empty", kind="frame_empty")
        if self._came + len(piece) > first.size:
            raise BadMessage(f"a message has more than the {first.size:,} bytes it said", kind="message_too_long")
        if len(piece) == first.size:
            return _message(first, piece)
        if self._first is None:
            self._first, self._payload = fields, self._allocate(first.size)
        self._payload[self._came : self._came + len(piece)] = piece
        self._came += len(piece)
        if self._came < first.size:
            return None
        self._first, self._came = None, 0
        return _message(first, self._payload)

    def _begin(self, frame: pb.Frame) -> pb.Frame:
        """Refuses a message that may not come, before memory is taken for it."""
        if frame.leg not in _NAMES:
            raise BadMessage(f"a frame has the unknown leg {frame.leg}", kind="unknown_leg")
        if _NAMES[frame.leg] not in self._legs:
            raise BadMessage(f"a {_NAMES[frame.leg]} message came from the wrong side", kind="wrong_side")
        if frame.size + len(frame.ids) > self.most_bytes:
            raise BadMessage(f"a message has more than {self.most_bytes:,} bytes", kind="message_too_large")
        if frame.poison and frame.size:
            raise BadMessage("a poisoned message has a payload", kind="poison_with_payload")
        self._check_credit()
        return frame


def _key(frame: pb.Frame) -> tuple[int, ...]:
    return frame.leg, frame.step, frame.microbatch, frame.size


def _message(first: pb.Frame, payload: bytes | memoryview) -> Message:
    poison = None if first.poison else payload
    return Message(_NAMES[first.leg], first.step, first.microbatch, first.basis_version, first.ids, poison)
