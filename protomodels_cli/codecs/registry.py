"""Which codecs there are, and how a leg's codec is written: `int8`, `topk:0.1+ef21`, `bf16+zstd`.

Those of this package are its files with `CODECS`; other packages add theirs through entry points in the group
`pmtrain.codecs`. A spec only ever names a codec: what it names is never imported unless somebody installed it here.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from protomodels_cli.codecs.base import BaseCodec, Codec, CodecError, Feedback, Packing, Word
from protomodels_cli.errors import UserError

GROUP = "pmtrain.codecs"


@dataclass(frozen=True)
class LegCodec:
    """What is written for a leg."""

    codec: Codec
    packing: Packing | None = None


@cache
def parse_codec(text: str) -> LegCodec:
    head, *wrappers = text.split("+")
    name, _, parameter = head.partition(":")
    base = _find(name)
    if base is None or not issubclass(base, BaseCodec):
        raise CodecError(f"{name!r} is no codec", _how_to_write())
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
        raise CodecError(f"{'+'.join(wrappers)!r} does not go on top of a codec", _how_to_write())
    return LegCodec(codec, packing)


@cache
def builtin() -> dict[str, type[Word]]:
    import protomodels_cli.codecs as package

    found: dict[str, type[Word]] = {}
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for word in getattr(importlib.import_module(file.name), "CODECS", ()):
            found[word.name] = word
    return dict(sorted(found.items()))


@cache
def known() -> dict[str, type[Word]]:
    """Every codec there is here, by name, those of other packages included."""
    return dict(sorted((builtin() | {name: _load(point) for name, point in _points().items()}).items()))


def usages(words: dict[str, type[Word]]) -> tuple[list[str], list[str], list[str]]:
    """How base codecs, feedback and packing are written."""

    def those(kind: type[Word]) -> list[str]:
        return [word.usage for word in words.values() if issubclass(word, kind)]

    return those(BaseCodec), those(Feedback), those(Packing)


def _how_to_write() -> str:
    base, feedback, packing = usages(known())
    return f"write {', '.join(base)}; then {' or '.join(feedback)}; then {' or '.join(packing)}"


def _find(name: str) -> type[Word] | None:
    points = _points()  # looked through even for a name of our own: one that is claimed twice is no name
    if name in builtin():
        return builtin()[name]
    return _load(points[name]) if name in points else None


@cache
def _points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in builtin() or point.name in found:
            owner = _described(found[point.name]) if point.name in found else "pmtrain itself"
            raise UserError(
                f"{_described(point)}: there is a codec of this name already, from {owner}",
                "rename one of them, or remove a package: peers must mean the same by a name",
            )
        found[point.name] = point
    return found


@cache
def _load(point: EntryPoint) -> type[Word]:
    fix = f"mend the package or remove it: pip uninstall {point.dist.name if point.dist else '…'}"
    try:
        word = point.load()
    except Exception as e:
        raise UserError(f"{_described(point)} cannot be loaded: {type(e).__name__}: {e}", fix) from e
    kinds = (BaseCodec, Feedback, Packing)
    if not (isinstance(word, type) and issubclass(word, kinds)):
        raise UserError(f"{_described(point)} is no BaseCodec, Feedback or Packing of protomodels_cli.codecs.base", fix)
    if missing := [a for a in ("name", "usage", "help") if not isinstance(getattr(word, a, None), str)]:
        raise UserError(f"{_described(point)} lacks {', '.join(missing)}", fix)
    if abstract := sorted(getattr(word, "__abstractmethods__", ())):
        raise UserError(f"{_described(point)} lacks {', '.join(abstract)}", fix)
    if word.name != point.name:
        raise UserError(f"{_described(point)} is a codec by another name, {word.name}", fix)
    return word


def _described(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
    return f"the codec {point.name} of {package} (entry point {point.value} in {GROUP})"
