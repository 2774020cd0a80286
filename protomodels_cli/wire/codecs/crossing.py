"""One end of a boundary: what leaves it and what comes in, both legs, with all that their codecs remember.

What is not finite never travels: a message with a NaN or an infinity in it becomes poison, which has no numbers and
arrives as NaNs alone. The step is then skipped by every stage, and no memory has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from protomodels_cli.protocol.messages import LEGS, BadMessage, Leg, MessageKey
from protomodels_cli.spec.codec import CodecChoice, parse_codec
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.spec.sizes import NAME_BYTES
from protomodels_cli.wire.codecs.base import Codec, Slot
from protomodels_cli.wire.codecs.feedback import AQSGD, EF, EF21, Memory
from protomodels_cli.wire.codecs.lowrank import LowRank
from protomodels_cli.wire.codecs.packing import from_bytes, to_bytes
from protomodels_cli.wire.codecs.rounding import BF16, Plain, Quantised
from protomodels_cli.wire.codecs.topk import MaskedTopK, Seen, TopK


class End:
    def __init__(self, spec: RunSpec):
        forward, backward = (parse_codec(text) for text in (spec.wire.forward, spec.wire.backward))
        self._seen: Seen = {}
        self._memories = {"forward": Memory(), "backward": Memory()}
        self._remembers_samples = forward.feedback == "aqsgd"
        seen = self._seen if backward.masked else None
        self.zstd: dict[Leg, bool] = {"forward": forward.zstd, "backward": backward.zstd, "evaluation": forward.zstd}
        self._codecs: dict[Leg, Codec] = {
            "forward": _with_feedback(forward, base_codec(forward, spec.seed, seen), self._memories["forward"]),
            "backward": _with_feedback(backward, base_codec(backward, spec.seed, seen), self._memories["backward"]),
            # The codec alone: a memory of other samples is no help. AQ-SGD sends what it sees first whole.
            "evaluation": Plain() if self._remembers_samples else base_codec(forward, spec.seed, None),
        }

    def slot(self, key: MessageKey, shape: Sequence[int], dtype: torch.dtype, windows: Tensor | None) -> Slot:
        """`windows` are the token ids of a forward message's samples."""
        samples: tuple[str, ...] = ()
        if self._remembers_samples and key.leg == "forward":
            assert windows is not None
            samples = tuple(_name(row) for row in windows.cpu().numpy().astype("<u4"))
        return Slot(key, tuple(shape), dtype, samples)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor] | None:
        """What travels; None is poison."""
        if not _finite(message):
            return None
        parts = self._codecs[slot.key.leg].encode(message, slot)
        self._forget_positions(slot)
        return parts

    def decode(self, parts: Sequence[Tensor] | None, slot: Slot, device: torch.device) -> Tensor:
        if parts is None:
            return torch.full(slot.shape, torch.nan, dtype=slot.dtype, device=device)
        message = self._codecs[slot.key.leg].decode(parts, slot)
        self._forget_positions(slot)
        return message

    def pack(self, message: Tensor, slot: Slot) -> bytes | None:
        parts = self.encode(message, slot)
        return None if parts is None else to_bytes(parts, self.zstd[slot.key.leg])

    def unpack(self, payload: bytes | None, slot: Slot, device: torch.device) -> Tensor:
        if payload is None:
            return self.decode(None, slot, device)
        leg = slot.key.leg
        parts = from_bytes(payload, self._codecs[leg].layout(slot), self.zstd[leg])
        if not all(_finite(p) for p in parts if p.is_floating_point()):
            raise BadMessage("a payload whose numbers are not finite")
        message = self.decode([p.to(device) for p in parts], slot, device)
        if not _finite(message):
            raise BadMessage("a payload whose numbers become too large")
        return message

    def _forget_positions(self, slot: Slot) -> None:
        if slot.key.leg == "backward":
            self._seen.pop(slot.key.microbatch, None)

    # Between steps

    def decide(self, apply: bool) -> None:
        """A step's outcome. One that was given up counts as not applied."""
        for memory in self._memories.values():
            memory.decide(apply)
        self._seen.clear()

    def reset(self) -> None:
        """The basis has moved: what is remembered was in other coordinates."""
        for memory in self._memories.values():
            memory.reset()

    def state(self) -> dict[str, Tensor]:
        """A few tensors, however many samples are remembered: theirs are one, in the order of their names."""
        found: dict[str, Tensor] = {}
        for leg, memory in self._memories.items():
            kept = memory.kept
            if self._remembers_samples and leg == "forward" and kept:
                names = sorted(kept)
                raw = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(len(names), NAME_BYTES)
                kept = {"samples": torch.from_numpy(raw.copy()), "last": torch.stack([kept[n] for n in names])}
            found |= {f"{leg}/{name}": tensor for name, tensor in kept.items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.reset()
        for key, tensor in state.items():
            leg, _, name = key.partition("/")
            if name == "last":
                names = [row.cpu().numpy().tobytes().hex() for row in state[f"{leg}/samples"]]
                self._memories[leg].kept |= dict(zip(names, tensor, strict=True))
            elif name != "samples":
                self._memories[leg].kept[name] = tensor


def base_codec(choice: CodecChoice, seed: int, seen: Seen | None) -> Codec:
    match choice.base:
        case "fp32":
            return Plain()
        case "bf16":
            return BF16()
        case "int8" | "int4":
            return Quantised(8 if choice.base == "int8" else 4, seed)
        case "topk":
            if choice.masked:
                assert seen is not None
                return MaskedTopK(seen)
            return TopK(choice.share, seen)
        case _:
            return LowRank(choice.rank, seed)


def _with_feedback(choice: CodecChoice, codec: Codec, memory: Memory) -> Codec:
    match choice.feedback:
        case "ef":
            return EF(codec, memory)
        case "ef21":
            return EF21(codec, memory)
        case "aqsgd":
            return AQSGD(codec, memory)
        case _:
            return codec


def _name(window: np.ndarray) -> str:
    return hashlib.blake2b(window.tobytes(), digest_size=NAME_BYTES).hexdigest()


def _finite(message: Tensor) -> bool:
    return bool(torch.isfinite(message).all())


class Carrier:
    """Every boundary of a run within one process, both ends of each: what the reference crosses them with."""

    def __init__(self, spec: RunSpec):
        boundaries = len(layers_per_stage(spec)) - 1
        self._ends = [(End(spec), End(spec)) for _ in range(boundaries)]  # before and behind each
        self.payload_bytes = dict.fromkeys(LEGS, 0)

    def __call__(self, message: Tensor, key: MessageKey, windows: Tensor | None = None) -> Tensor:
        before, behind = self._ends[key.boundary]
        sender, receiver = (behind, before) if key.leg == "backward" else (before, behind)
        slot = sender.slot(key, message.shape, message.dtype, windows)
        if sender.zstd[key.leg]:
            payload = sender.pack(message.detach(), slot)
            self.payload_bytes[key.leg] += len(payload or b"")
            return receiver.unpack(payload, slot, message.device)
        parts = sender.encode(message.detach(), slot)
        self.payload_bytes[key.leg] += sum(p.nbytes for p in parts or ())
        return receiver.decode(parts, slot, message.device)

    def state(self, stage: int) -> dict[str, Tensor]:
        """What a stage's own ends remember, by the side they are on."""
        ends = {}
        if stage > 0:
            ends["previous"] = self._ends[stage - 1][1]
        if stage < len(self._ends):
            ends["next"] = self._ends[stage][0]
        return {f"{side}/{name}": t for side, end in ends.items() for name, t in end.state().items()}

    def decide(self, apply: bool) -> None:
        for end in self._all():
            end.decide(apply)

    def reset(self) -> None:
        for end in self._all():
            end.reset()

    def _all(self) -> list[End]:
        return [end for pair in self._ends for end in pair]
