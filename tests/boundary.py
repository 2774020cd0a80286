"""Boundaries for the tests of codecs: every codec there is, on both legs, and messages to send."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from conftest import make_spec

from protomodels_cli.codecs import End, parse_codec
from protomodels_cli.codecs.base import BaseCodec, CodecError, Feedback, Packing, Slot, Surroundings, Word
from protomodels_cli.codecs.registry import known
from protomodels_cli.protocol.messages import MessageKey
from protomodels_cli.spec import RunSpec

CPU = torch.device("cpu")


def of_kind(kind: type[Word]) -> list[type[Word]]:
    return [word for word in known().values() if issubclass(word, kind)]


BASES = [text for word in of_kind(BaseCodec) for text in (word.examples or (word.name,))]


def wires() -> Iterator[tuple[str, str]]:
    """Every base, with every feedback and packing that goes on top of it, on the legs that it fits."""
    for base in BASES:
        for feedback in ("", *(f"+{word.name}" for word in of_kind(Feedback))):
            for packing in ("", *(f"+{word.name}" for word in of_kind(Packing))):
                text = base + feedback + packing
                for wire in ((text, text), (text, "int8")):
                    if fits(*wire):
                        yield wire
                        break
    yield "topk:0.1", "topk:mask"
    yield "topk:0.3+ef21", "topk:mask+ef+zstd"
    yield "int4+aqsgd+zstd", "topk:0.2"
    yield "eden:3 then eden:5", "int4 then int8 then bf16"
    yield "int4+zstd then fp32+zstd", "lowrank:1 then int8"


def fits(forward: str, backward: str) -> bool:
    try:
        a, b = parse_codec(forward).codec, parse_codec(backward).codec
    except CodecError:
        return False
    places = Surroundings("forward", b, "epochs"), Surroundings("backward", a, "epochs")
    return not [*a.contradictions(places[0]), *b.contradictions(places[1])]


WIRES = list(wires())
REMEMBERING = ["int4+ef", "topk:0.2+ef21", "int4+aqsgd"]


def wire_spec(forward: str, backward: str, **sections: object) -> RunSpec:
    return make_spec(wire={"forward": forward, "backward": backward}, **sections)


def plain(codec: str) -> End:
    return End(wire_spec(codec, "fp32"))


def slot_of(x: torch.Tensor, key: MessageKey, seed: int = 0) -> Slot:
    return Slot(key, tuple(x.shape), x.dtype, seed)


def windows_of(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Token ids that tell the samples apart."""
    return torch.arange(first, first + len(x))[:, None].expand(-1, 5)


def stream(count: int) -> Iterator[tuple[torch.Tensor, MessageKey]]:
    g = torch.Generator().manual_seed(7)
    for i in range(count):
        yield torch.randn(2, 4, 6, generator=g), MessageKey(i // 2 + 1, i % 2, 0, "forward")
