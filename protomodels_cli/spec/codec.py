"""How a codec is written: `int8`, `topk:0.1+ef21`, `bf16+zstd`. Words only; what they do is in wire/codecs."""

from __future__ import annotations

import math
from dataclasses import dataclass

BASES = ("fp32", "bf16", "int8", "int4", "topk", "lowrank")
FEEDBACKS = ("ef", "ef21", "aqsgd")
MASK = "mask"

_FORMS = "fp32, bf16, int8, int4, topk:SHARE, topk:mask, lowrank:RANK; then +ef, +ef21 or +aqsgd; then +zstd"


class CodecError(ValueError):
    def __init__(self, rule: str, fix: str = f"write {_FORMS}"):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


@dataclass(frozen=True)
class CodecChoice:
    base: str
    share: float = 0.0  # topk: of a sample's numbers, those that are sent
    rank: int = 0  # lowrank
    feedback: str = ""
    zstd: bool = False

    @property
    def masked(self) -> bool:
        """`topk:mask`: a gradient's numbers are those that the activations of its microbatch had."""
        return self.base == "topk" and not self.share


def parse_codec(text: str) -> CodecChoice:
    head, *wrappers = text.split("+")
    base, _, parameter = head.partition(":")
    if base not in BASES:
        raise CodecError(f"{base!r} is no codec")
    zstd = bool(wrappers) and wrappers[-1] == "zstd"
    feedbacks = wrappers[:-1] if zstd else wrappers
    if len(feedbacks) > 1 or not set(feedbacks) <= set(FEEDBACKS):
        raise CodecError(f"{'+'.join(wrappers)!r} does not go on top of a codec")
    feedback = feedbacks[0] if feedbacks else ""
    if feedback and base == "fp32":
        raise CodecError(f"fp32 loses nothing that {feedback} could make up for", "leave it out, or choose a codec")
    share, rank = 0.0, 0
    if base == "topk":
        share = 0.0 if parameter == MASK else _number(parameter, "topk needs the share of numbers sent", "topk:0.1")
        if parameter != MASK and not 0 < share <= 1:
            raise CodecError(f"the share {parameter} is not above 0 and at most 1", "write for example topk:0.1")
    elif base == "lowrank":
        value = _number(parameter, "lowrank needs its rank", "lowrank:4")
        if value < 1 or value != int(value):
            raise CodecError(f"the rank {parameter} is no whole number from 1", "write for example lowrank:4")
        rank = int(value)
    elif parameter:
        raise CodecError(f"{base} takes no number", f"write {base}")
    return CodecChoice(base, share, rank, feedback, zstd)


def _number(text: str, rule: str, example: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise CodecError(rule, f"write for example {example}")
    return number
