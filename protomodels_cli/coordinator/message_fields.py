"""What a peer's message may contain: a rule for every field, checked before an event is made of the message.

Knows protobuf and the spec. It must not know the run's state, nor what follows from a message that breaks a rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protomodels_cli.quantities import LATEST
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.cap import LEAST as LEAST_CAP
from protomodels_cli.wire.frames import LEG_NUMBERS

# Larger than any honest number of steps, bytes or messages. Above it, a float does not hold every whole number.
MOST = 2**53
LEAST_COMPUTING, MOST_SECONDS = 1e-9, 1e9  # seconds that a stage computed, if it did; that anything took
LEAST_FLOPS, MOST_FLOPS = 1.0, 1e21  # a second
LEGS = frozenset(LEG_NUMBERS.values())


@dataclass(frozen=True)
class Rule:
    words: str
    holds: Callable[[Any, RunSpec], bool]
    edges: tuple[float, ...] = ()  # numbers at which it begins and ends to hold


def _number(words: str, least: float, most: float) -> Rule:
    return Rule(words, lambda value, _: value == 0 or least <= value <= most, (least, most))  # false for NaN


COUNT = Rule(f"a whole number up to {MOST}", lambda value, _: value <= MOST, (MOST,))
STAGE = Rule("a stage of the run", lambda value, spec: value < spec.model.layers)
LAYERS = Rule("a number of layers of the model", lambda value, spec: 0 < value <= spec.model.layers)
PORT = Rule("a port", lambda value, _: value <= 65535)
SECONDS = _number("a time in seconds", 0.0, MOST_SECONDS)
COMPUTING = _number("0 or a time of computing in seconds", LEAST_COMPUTING, MOST_SECONDS)
CAP = _number("0 or a number of bits a second that `join` takes", LEAST_CAP, 1e15)
CLOCK = _number("0 or a time in seconds since 1970", 1.0, LATEST)
FLOPS = _number("0 or a number of operations a second", LEAST_FLOPS, MOST_FLOPS)
SQUARE = Rule("a square", lambda value, _: not value < 0)  # of a run that diverges it may be infinite, or no number
RATIO = Rule("a ratio", lambda value, _: not value < 0)  # likewise
WARMTH = _number("0 or a temperature or power of a card", 0.0, 1e4)
LOSS = Rule("a sum of losses", lambda value, _: True)  # likewise
YES_OR_NO = Rule("yes or no", lambda value, _: True)
LEG = Rule("a leg", lambda value, _: value in LEGS)
TEXT = Rule("text", lambda value, _: True)  # a message has a largest size; what is shown of a text is shortened
HASH = Rule("a SHA-256 in hexadecimal", lambda value, _: not value or re.fullmatch("[0-9a-f]{64}", value) is not None)
DIGEST = Rule("the 32 bytes of a SHA-256", lambda value, _: len(value) == 32)
NONCE = Rule("up to 64 bytes", lambda value, _: len(value) <= 64)

# By message and field. Fields that hold a message are not listed; the fields of that message are.
FIELDS: dict[str, dict[str, Rule]] = {
    "Proof": {"nonce": NONCE, "sha256": HASH},
    "Verdict": {"audit": Rule("the number of an audit", lambda value, _: value < 2**63), "failed": TEXT},
    "Comparison": {"leg": LEG, "numbers": COUNT, "wild": COUNT},
    "PartFailed": {"lineage": COUNT, "step": COUNT, "why": TEXT, "stage": STAGE},
    "SnapshotLost": {"generation": COUNT, "lineage": COUNT, "step": COUNT, "why": TEXT},
    "Register": {
        "spec_sha256": HASH,
        "device": TEXT,
        "memory": COUNT,
        "flops": FLOPS,
        "host_memory": COUNT,
        "port": PORT,
        "name": TEXT,
        "dtype": TEXT,
        "compiled": YES_OR_NO,
        "card": TEXT,
        "card_memory": COUNT,
        "addresses": TEXT,
        "machine": TEXT,
        "outside_port": PORT,
        "outside_host": TEXT,
        "upload": CAP,
        "download": CAP,
    },
    "Rest": {"over": YES_OR_NO, "until": CLOCK, "by_owner": YES_OR_NO},
    "RelayTrip": {"relay": TEXT, "seconds": SECONDS},
    "Holding": {
        "lineage": COUNT,
        "stage": STAGE,
        "layers_per_stage": LAYERS,
        "applied": COUNT,
        "prepared": COUNT,
        "generation": COUNT,
    },
    "Part": {"lineage": COUNT, "step": COUNT, "stage": STAGE, "sha256": HASH},
    "Done": {
        "task": COUNT,
        "t_fixed_sha256": HASH,
        "t_fixed_version": COUNT,
        "basis_sha256": HASH,
        "basis_version": COUNT,
        "loss_sum": LOSS,
        "tokens": COUNT,
        "generation": COUNT,
    },
    "Recorded": {
        "forward_in": DIGEST,
        "forward_out": DIGEST,
        "backward_in": DIGEST,
        "backward_out": DIGEST,
        "step": COUNT,
    },
    "UnitNorm": {"unit": TEXT, "squared": SQUARE},
    "ParameterHash": {"name": TEXT, "sha256": HASH},
    "Usage": {
        "compute_s": COMPUTING,
        **dict.fromkeys(("wait_s", "wire_s", "cpu_s", "round_trip_s", "path_s"), SECONDS),
        **dict.fromkeys(
            ("forward_bytes", "backward_bytes", "peak_memory", "forecast_memory", "reserved_memory"), COUNT
        ),
        **dict.fromkeys(("most_in_flight", "refused_frames"), COUNT),
        **dict.fromkeys(("path", "punch"), TEXT),
        **dict.fromkeys(("grown_forward", "grown_backward"), RATIO),
        **dict.fromkeys(("celsius", "watts"), WARMTH),
    },
    "BasisTaken": {"version": COUNT, "sha256": HASH, "generation": COUNT},
    "Trouble": {
        "detail": TEXT,
        "about": STAGE,
        "generation": COUNT,
        "kind": TEXT,
        "seconds": SECONDS,
    },
}


EDGES = sorted({edge for rules in FIELDS.values() for rule in rules.values() for edge in rule.edges})


def check(message: Message, spec: RunSpec, path: str = "") -> None:
    """Raises ValueError with the field, its value and its rule, for the first field of a message that breaks it."""
    for name, rule in FIELDS.get(message.DESCRIPTOR.name, {}).items():
        value = getattr(message, name)  # also where it was not sent: then it is zero or empty
        for one in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,):
            if not rule.holds(one, spec):
                raise ValueError(f"{path}{name} is {_shown(one)}, which is not {rule.words}")
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                check(inner, spec, f"{path}{field.name}.")


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value!r:.80}"
