"""Which codecs there are, and how the codec of a leg is written: `int8`, `topk:0.1+ef21`, `bf16+zstd`, or several of
them in turn, `eden:3 then eden:5`.

Our own are the `CODECS` of the files beside this one; other packages add theirs through entry points of the group
`pmtrain.codecs`. A spec only names a codec: nothing is imported that is not installed here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from functools import cache

from protomodels_cli.codecs.base import BaseCodec, Codec, CodecError, Feedback, Packing, Word
from protomodels_cli.codecs.in_turn import THEN, InTurn
from protomodels_cli.plugins import Registry, UnknownName

GROUP = "pmtrain.codecs"


@dataclass(frozen=True)
class LegCodec:
    """The codec of a leg, parsed."""

    codec: Codec
    packing: Packing | None = None


@cache
def parse_codec(text: str) -> LegCodec:
    parts = [_parse_one(part.strip()) for part in text.split(THEN)]
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({type(part.packing) for part in parts}) > 1:
        raise CodecError("codecs in turn must be packed alike", "write +zstd behind each codec, or behind none")
    return LegCodec(InTurn.of([part.codec for part in parts]), first.packing)


def _parse_one(text: str) -> LegCodec:
    head, *wrappers = text.split("+")
    name, _, parameter = head.partition(":")
    base = _find(name)
    if base is None or not issubclass(base, BaseCodec):
        raise CodecError(f"there is no codec {name!r}", _how_to_write())
    codec: Codec = base.parse(parameter)
    on_top = [_find(wrapper) for wrapper in wrappers]
    packing = None
    if on_top and (last := on_top[-1]) is not None and issubclass(last, Packing):
        packing = last()
        on_top.pop()
    for word in on_top[:1]:
        if word is not None and issubclass(word, Feedback):
            codec = word.on(codec)
            on_top.pop()
    if on_top:
        raise CodecError(f"{'+' + '+'.join(wrappers)!r} cannot follow a codec", _how_to_write())
    return LegCodec(codec, packing)


def names_in(text: str) -> list[str]:
    """The names of which the codec of a leg is made: base codec, feedback, packing."""
    found = []
    for part in text.split(THEN):
        head, *wrappers = part.strip().split("+")
        found += [head.partition(":")[0], *wrappers]
    return found


@cache
def registry() -> Registry[type[Word]]:
    import protomodels_cli.codecs as package

    found: dict[str, type[Word]] = {}
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for word in getattr(importlib.import_module(file.name), "CODECS", ()):
            found[word.name] = word
    return Registry(GROUP, _is_word, dict(sorted(found.items())))


def known() -> dict[str, type[Word]]:
    """Every codec there is here, by name, those of other packages included."""
    return {name: registry().get(name) for name in registry().names}


def _is_word(found: object) -> bool:
    if not (isinstance(found, type) and issubclass(found, BaseCodec | Feedback | Packing)):
        return False
    return not inspect.isabstract(found) and all(hasattr(found, said) for said in ("name", "usage", "help"))


def _find(name: str) -> type[Word] | None:
    try:
        return registry().get(name)
    except UnknownName:
        return None


def _how_to_write() -> str:
    def those(kind: type[Word]) -> list[str]:
        return [word.usage for word in known().values() if issubclass(word, kind)]

    base, feedback, packing = those(BaseCodec), those(Feedback), those(Packing)
    return f"write one of {', '.join(base)}; then perhaps {' or '.join(feedback)}; then perhaps {' or '.join(packing)}"
