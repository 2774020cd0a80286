"""One end of a boundary: what leaves it and what comes in, both legs, with all that their codecs remember.

What is not finite never travels: a message with a NaN or an infinity in it becomes poison, which has no numbers and
arrives as NaNs alone. The step is then skipped by every stage, and no memory has changed. Knows no codec by name.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import NAME_BYTES, Codec, Fused, Memory, Packing, Slot
from protomodels_cli.codecs.packing import from_bytes, to_bytes
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.lazy import lazy_import
from protomodels_cli.protocol.messages import LEGS, BadMessage, Leg, MessageKey

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
    from protomodels_cli.spec.schema import RunSpec
else:
    torch = lazy_import("torch")


class End:
    def __init__(self, spec: RunSpec):
        forward, backward = parse_codec(spec.wire.forward), parse_codec(spec.wire.backward)
        self._seed, self._steps = spec.seed, spec.steps
        self.compiled = False  # whether functions of tensors are, in training
        self.codecs: dict[Leg, Codec] = {
            "forward": forward.codec,
            "backward": backward.codec,
            "evaluation": forward.codec.for_evaluation(),
        }
        self.packing: dict[Leg, Packing | None] = {
            "forward": forward.packing,
            "backward": backward.packing,
            "evaluation": forward.packing,
        }
        self._memories: dict[Leg, Memory] = {"forward": Memory(), "backward": Memory()}
        self._positions: dict[int, Tensor] | None = {} if backward.codec.uses_positions else None

    def twin(self) -> End:
        """Another end that remembers the same, and changes by itself."""
        twin = copy(self)
        twin._memories = {leg: memory.twin() for leg, memory in self._memories.items()}
        twin._positions = None if self._positions is None else dict(self._positions)
        return twin

    def slot(self, key: MessageKey, shape: Sequence[int], dtype: torch.dtype, windows: Tensor | None) -> Slot:
        """`windows` are the token ids of a forward message's samples."""
        samples: tuple[str, ...] = ()
        if self.codecs[key.leg].remembers_samples:
            assert windows is not None
            samples = tuple(_name(row) for row in windows.cpu().numpy().astype("<u4"))
        compiled = self.compiled and key.leg != "evaluation"
        return Slot(key, tuple(shape), dtype, self._seed, samples, compiled=compiled, steps=self._steps)

    def first_steps(self) -> list[int]:
        """Those from which on messages of one leg or the other look otherwise than before."""
        return sorted({step for codec in self.codecs.values() for step in codec.first_steps(self._steps)})

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor] | None:
        """The tensors that travel; None is poison."""
        if not _finite(message):
            return None
        tensors = self.codecs[slot.key.leg].encode(message, self._here(slot))
        self._forget_positions(slot)
        return tensors

    def encode_unread(self, message: Tensor, slot: Slot) -> tuple[list[Tensor], Tensor]:
        """The tensors that travel if the message is finite, and whether it is: for a device whose answer takes time.
        Where it is not, a message of zeros goes through the codec; what that remembers is dropped with the step. None
        travel where activations that were not finite left no positions: the gradient is not finite either.

        A codec with its memory on the host waits for the device anyway, so poison leaves no trace there: the receiver
        stages nothing for it either, and the sizes of the step's later messages follow from what both remember."""
        codec = self.codecs[slot.key.leg]
        if codec.memory_on_host:
            found = self.encode(message, slot)
            return found or [], torch.full((), found is not None, device=message.device)
        if self._positions is not None and slot.key.leg == "backward" and slot.key.microbatch not in self._positions:
            return [], torch.zeros((), dtype=torch.bool, device=message.device)
        finite = all_finite(slot, message)
        clean = _zeros_unless(slot, finite, message)
        tensors = codec.encode(clean, self._here(slot))
        self._forget_positions(slot)
        return tensors, finite

    def decode(self, tensors: Sequence[Tensor] | None, slot: Slot, device: torch.device) -> Tensor:
        codec = self.codecs[slot.key.leg]
        if tensors is None:
            return codec.poison(slot, device)
        message = codec.decode(tensors, self._here(slot))
        self._forget_positions(slot)
        return message

    def layout(self, slot: Slot) -> Layout:
        """What a message's tensors look like, as far as this end knows by now."""
        return self.codecs[slot.key.leg].layout(self._here(slot))

    def pack(self, message: Tensor, slot: Slot) -> bytes | None:
        tensors = self.encode(message, slot)
        if tensors is None:
            return None
        packing = self.packing[slot.key.leg]
        return to_bytes(tensors) if packing is None else packing.pack(tensors)

    def unpack(self, payload: bytes | memoryview | None, slot: Slot, device: torch.device) -> Tensor:
        if payload is None:
            return self.decode(None, slot, device)
        packing, layout = self.packing[slot.key.leg], self.layout(slot)
        tensors = from_bytes(payload, layout) if packing is None else packing.unpack(bytes(payload), layout)
        if not all(_finite(p) for p in tensors if p.is_floating_point()):
            raise BadMessage("a payload with numbers that are not finite", "not_finite")
        message = self.decode([p.to(device) for p in tensors], slot, device)
        if not _finite(message):
            raise BadMessage("a payload with numbers that become too large", "not_finite")
        return message

    def _here(self, slot: Slot) -> Slot:
        """The slot with this end's memory; evaluation gets an empty one."""
        if slot.key.leg == "evaluation":
            return replace(slot, memory=Memory(), positions=None)
        return replace(slot, memory=self._memories[slot.key.leg], positions=self._positions)

    def _forget_positions(self, slot: Slot) -> None:
        if self._positions is not None and slot.key.leg == "backward":
            self._positions.pop(slot.key.microbatch, None)

    # Between steps

    def decide(self, apply: bool) -> None:
        """A step was applied or not (skipped or abandoned): keep or drop what codecs learnt in it."""
        for memory in self._memories.values():
            memory.decide(apply)
        if self._positions is not None:
            self._positions.clear()

    def reset(self) -> None:
        """Forget everything: the basis has moved, and what is remembered was in other coordinates."""
        for memory in self._memories.values():
            memory.reset()

    def state(self) -> dict[str, Tensor]:
        return {
            f"{leg}/{name}": tensor
            for leg, memory in self._memories.items()
            for name, tensor in self.codecs[leg].saved(memory.kept).items()
        }

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Load memories from a snapshot. `device` is the stage's; a codec may want its memory elsewhere."""
        self.reset()
        for leg, memory in self._memories.items():
            codec = self.codecs[leg]
            home = torch.device("cpu") if codec.memory_on_host else device
            saved = {k.removeprefix(f"{leg}/"): t.to(home) for k, t in state.items() if k.startswith(f"{leg}/")}
            memory.kept |= codec.restored(saved)


def _name(window: np.ndarray) -> str:
    return hashlib.blake2b(window.tobytes(), digest_size=NAME_BYTES).hexdigest()


def _finite(message: Tensor) -> bool:
    return bool(torch.isfinite(message).all())


@Fused
def all_finite(message: Tensor) -> Tensor:
    return torch.isfinite(message).all()


@Fused
def _zeros_unless(finite: Tensor, message: Tensor) -> Tensor:
    return torch.where(finite, message, 0)


@Fused
def _nans_unless(finite: Tensor, message: Tensor) -> Tensor:
    return torch.where(finite, message, torch.nan)


class Carrier:
    """Every boundary of a run within one process, both ends of each: what the reference crosses them with."""

    def __init__(self, spec: RunSpec):
        # before and behind each boundary, made when something first crosses it
        self._ends: defaultdict[int, tuple[End, End]] = defaultdict(lambda: (self._end(spec), self._end(spec)))
        self.compiled = False  # whether the codecs' functions are, in training
        self.payload_bytes = dict.fromkeys(LEGS, 0)

    def __call__(self, message: Tensor, key: MessageKey, windows: Tensor | None = None) -> Tensor:
        before, behind = self._ends[key.boundary]
        sender, receiver = (behind, before) if key.leg == "backward" else (before, behind)
        slot = sender.slot(key, message.shape, message.dtype, windows)
        if sender.packing[key.leg] is not None:
            payload = sender.pack(message.detach(), slot)
            self.payload_bytes[key.leg] += len(payload or b"")
            return receiver.unpack(payload, slot, message.device)
        if message.is_cuda:
            return self._cross_unread(sender, receiver, message.detach(), slot)
        tensors = sender.encode(message.detach(), slot)
        self.payload_bytes[key.leg] += sum(p.nbytes for p in tensors or ())
        return receiver.decode(tensors, slot, message.device)

    def _cross_unread(self, sender: End, receiver: End, message: Tensor, slot: Slot) -> Tensor:
        """The same without waiting for the device to say whether the message is finite: what arrives is NaNs alone if
        it is not."""
        tensors, finite = sender.encode_unread(message, slot)
        self.payload_bytes[slot.key.leg] += sum(p.nbytes for p in tensors)
        return _nans_unless(slot, finite, receiver.decode(tensors or None, slot, message.device))

    def _end(self, spec: RunSpec) -> End:
        end = End(spec)
        end.compiled = self.compiled
        return end

    def state(self, stage: int) -> dict[str, Tensor]:
        """The memories at a stage's ends of its boundaries, by side."""
        ends = {}
        if stage - 1 in self._ends:
            ends["previous"] = self._ends[stage - 1][1]
        if stage in self._ends:
            ends["next"] = self._ends[stage][0]
        return {f"{side}/{name}": t for side, end in ends.items() for name, t in end.state().items()}

    def decide(self, apply: bool) -> None:
        for end in self._all():
            end.decide(apply)

    def reset(self) -> None:
        for end in self._all():
            end.reset()

    def _all(self) -> list[End]:
        return [end for pair in self._ends.values() for end in pair]
