"""Faults of what travels: between stages, from the coordinator to a peer, and of the way itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from marks import first, mark


def as_sent(patch: Any, changed: Callable[[Any, Any], Any]) -> None:
    """Messages are changed (by their slot) just before they are packed, on a processor and on a card."""
    from protomodels_cli.codecs import End

    def and_change(encode: Any) -> Any:
        return lambda self, message, slot: encode(self, changed(message, slot), slot)

    for name in ("encode", "encode_unread"):
        patch.setattr(End, name, and_change(getattr(End, name)))


def poison(patch: Any, once: bool = False, **key: Any) -> None:
    """One message of the run is not finite where it is packed. Each time it is packed, or `once`."""
    import torch

    from protomodels_cli.protocol.messages import MessageKey

    bad = MessageKey(**key)

    def spoilt(message: Any, slot: Any) -> Any:
        if slot.key == bad and (not once or first()):
            mark(**key)
            return torch.full_like(message, torch.nan)
        return message

    as_sent(patch, spoilt)


def perturb(patch: Any, share: float, by: float) -> None:
    """A liar: of every message that this peer sends, this share of the numbers is larger by that much."""

    def marked(message: Any, slot: Any) -> Any:
        mark(share=share, by=by)
        return perturbed(message, slot, share, by)

    as_sent(patch, marked)


def perturbed(message: Any, slot: Any, share: float, by: float) -> Any:
    """The same numbers of a message in every process."""
    import torch

    from protomodels_cli import counter

    key = slot.key
    seed = counter.subseed(0, "lie", key.step, key.microbatch, key.boundary, key.leg)
    chosen = torch.rand(message.shape, generator=torch.Generator().manual_seed(seed % 2**31)) < share
    return torch.where(chosen.to(message.device), (1 + by) * message, message)


def inflate(patch: Any, by: float, since: int) -> None:
    """A liar: every message that this peer sends from this step on is so many times as large."""

    def inflated(message: Any, slot: Any) -> Any:
        if slot.key.step < since:
            return message
        mark(by=by)
        return by * message

    as_sent(patch, inflated)


def two_faced(patch: Any) -> None:
    """A liar: reports other hashes of its messages than they have."""
    from protomodels_cli.worker import recording

    right = recording.digest_of

    def wrong(message: Any) -> bytes:
        mark()
        return bytes(reversed(right(message)))

    patch.setattr(recording, "digest_of", wrong)


def lose_turn(patch: Any, stage: int, step: int) -> None:
    """The coordinator's word on this step does not reach a peer, whose connection stays."""
    from protomodels_cli.coordinator.service import ControlStream

    say, said = ControlStream.send, []

    def or_not(self: ControlStream, message: Any) -> None:
        say(self, message)
        if message.HasField("turn") and message.turn.decision.step == step:
            said.append(message)
            if len(said) == stage + 1:
                lost = self.outbox._queue.pop()  # type: ignore[attr-defined]
                mark(stage=stage, step=lost.turn.decision.step)

    patch.setattr(ControlStream, "send", or_not)


def damage_bytes(patch: Any, after: int) -> None:
    """Every link goes through the coordinator, which changes one bit of one, once, after that many bytes."""
    from protomodels_cli.wire.splice import Pump

    receive, passed = Pump.data_received, Counter[Pump]()

    def damaged(self: Pump, data: bytes) -> None:
        passed[self] += len(data)
        if passed[self] > after and first():
            mark(after=after)
            data = bytes([data[0] ^ 1]) + data[1:]
        receive(self, data)

    patch.setattr(Pump, "data_received", damaged)
    unreachable(patch)


def cut_link(patch: Any, step: int) -> None:
    """The stream to the next stage breaks in the middle of a step, once. Marks every microbatch that is computed in
    that step."""
    from protomodels_cli.wire.frames import Frame
    from protomodels_cli.wire.pb import pmtrain_pb2 as pb
    from protomodels_cli.worker.stage_work import StageWork

    write, forward = Frame.to_bytes, StageWork.forward

    def or_break(self: Frame) -> bytes:
        f = self.fields
        if (f.step, f.microbatch, f.leg) == (step, 1, pb.Frame.FORWARD) and first():
            mark(step=step)
            raise ConnectionError("cut by a test")
        return write(self)

    def counted(self: StageWork, work: Any, message: Any) -> Any:
        if message.step == step and message.leg == "forward":
            mark(computed=message.microbatch, stage=self.stage.slice.index)
        return forward(self, work, message)

    patch.setattr(Frame, "to_bytes", or_break)
    patch.setattr(StageWork, "forward", counted)


def lose_way(patch: Any, step: int) -> None:
    """As cut_link, and from then on nobody can be dialled where they could be before."""
    from protomodels_cli import timeouts
    from protomodels_cli.worker import paths

    attempt = paths.Way._attempt

    async def or_hang(self: Any, one: Any) -> Any:
        if self.link.broken.is_set() and not paths.is_relayed(one.path):
            mark(lost=one.place[1])
            await asyncio.sleep(3600)
        return await attempt(self, one)

    patch.setattr(paths.Way, "_attempt", or_hang)
    patch.setattr(timeouts, "PATH_DIRECT_ALONE", 0.5)
    cut_link(patch, step)


def lose_message(patch: Any, step: int) -> None:
    """One message to the next stage is never sent, and nobody notices."""
    from protomodels_cli.worker.links import Link

    send = Link.send

    def or_not(self: Link, message: Any) -> None:
        is_last = (message.step, message.microbatch) == (step, 1)  # a gap would be noticed
        if is_last and self.to_next and first():
            mark(step=step)
        else:
            send(self, message)

    patch.setattr(Link, "send", or_not)


def feed_out_of_order(patch: Any, step: int) -> None:
    """The coordinator hands the ids of a step to the first stage the wrong way round."""
    from protomodels_cli.coordinator.feed import Feed

    feed = Feed.step

    def reversed_once(self: Feed, at: int) -> Any:
        if at == step and first():
            mark(step=step)
            return reversed(list(feed(self, at)))
        return feed(self, at)

    patch.setattr(Feed, "step", reversed_once)


def unreachable(patch: Any) -> None:
    """As behind home routers, each behind its own: nobody can dial anybody."""

    def nowhere(*_: Any) -> tuple[()]:
        mark()
        return ()

    patch.setattr("protomodels_cli.coordinator.candidates.candidates_for", nowhere)
    patch.setattr("protomodels_cli.coordinator.routes.candidates_for", nowhere)
