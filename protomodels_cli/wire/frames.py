"""Messages over a boundary, cut into frames and put together again. Pure: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

from protomodels_cli.protocol.messages import BadMessage, Leg
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

_LEGS: dict[Leg, pb.Frame.Leg] = {
    "forward": pb.Frame.FORWARD,
    "backward": pb.Frame.BACKWARD,
    "evaluation": pb.Frame.EVALUATION,
}
_NAMES = {number: name for name, number in _LEGS.items()}


@dataclass(frozen=True)
class Message:
    """One microbatch's activations or gradients, packed, or (on the first stage) its token ids alone."""

    leg: Leg
    step: int
    microbatch: int
    basis_version: int
    ids: bytes
    payload: bytes | memoryview | None  # None is poison: the numbers were not finite


def frames_of(message: Message, generation: int) -> Iterator[pb.Frame]:
    payload = message.payload or b""
    for start in range(0, max(1, len(payload)), PIECE):
        ids, piece = message.ids if start == 0 else b"", bytes(payload[start : start + PIECE])
        yield pb.Frame(
            leg=_LEGS[message.leg],
            generation=generation,
            step=message.step,
            microbatch=message.microbatch,
            basis_version=message.basis_version,
            ids=ids,
            payload=piece,
            more=start + PIECE < len(payload),
            poison=message.payload is None,
            crc=crc32(piece, crc32(ids)),
        )


class Assembler:
    """Frames of one link, in order, back to messages. Refuses what cannot be part of a whole one."""

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self._pieces: list[pb.Frame] = []
        self._size = 0

    def add(self, frame: pb.Frame) -> Message | None:
        """The message that this frame completes, if it does."""
        if frame.leg not in _NAMES:
            raise BadMessage(f"a frame has the unknown leg {frame.leg}", kind="unknown_leg")
        if frame.crc != crc32(frame.payload, crc32(frame.ids)):
            raise BadMessage("a frame arrived damaged (checksum mismatch)", kind="frame_damaged")
        if self._pieces:
            first = self._pieces[0]
            same = (frame.leg, frame.step, frame.microbatch) == (first.leg, first.step, first.microbatch)
            if not same or frame.ids:
                raise BadMessage("a frame interrupts another message", kind="frame_out_of_order")
        if frame.more and not frame.payload:
            raise BadMessage("a frame of a longer message is empty", kind="frame_empty")
        self._pieces.append(frame)
        self._size += len(frame.payload) + len(frame.ids)
        if self._size > self.most_bytes:
            raise BadMessage(f"a message has more than {self.most_bytes:,} bytes", kind="message_too_large")
        if frame.more:
            return None
        pieces, self._pieces, self._size = self._pieces, [], 0
        payload: bytes | None = pieces[0].payload if len(pieces) == 1 else b"".join(p.payload for p in pieces)
        first = pieces[0]
        if first.poison:
            if payload:
                raise BadMessage("a poisoned message has a payload", kind="poison_with_payload")
            payload = None
        return Message(_NAMES[first.leg], first.step, first.microbatch, first.basis_version, first.ids, payload)
