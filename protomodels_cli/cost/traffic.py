"""Bytes over a boundary, and bytes that codecs hold at its ends. Asks the codecs; knows none by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from protomodels_cli.codecs.base import AtEnds, Codec, Extent, Kept
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.cost.units import number_bytes
from protomodels_cli.protocol.messages import Leg
from protomodels_cli.spec.schema import RunSpec


def id_bytes(spec: RunSpec) -> int:
    """Bytes of a token id on the wire."""
    return 2 if spec.vocab_size <= 1 << 16 else 3


def boundary_bytes(spec: RunSpec) -> dict[str, float]:
    """Bytes a token over one boundary: numbers each way, and the token id on the way forward.

    Of a codec that remembers samples, once it has seen them; of a packed one, before it is packed: what packing gains
    depends on the numbers."""
    tokens = spec.batch.size // spec.batch.microbatches * spec.model.context
    return {
        "forward": message_bytes(spec, "forward") / tokens + id_bytes(spec),
        "backward": message_bytes(spec, "backward") / tokens,
        "dense_bf16_each_way": 2.0 * spec.model.width,
    }


def message_bytes(spec: RunSpec, leg: Leg) -> int:
    """Bytes of a microbatch's numbers: values, scales and indices."""
    codec, extent = _on(spec, leg)
    return codec.message_bytes(extent)


class Sides(NamedTuple):
    """Bytes at a stage's end towards the previous stage, and at its end towards the next."""

    previous: int
    next: int

    def at(self, first: bool, last: bool) -> int:
        """Of a stage: the first has no previous one, the last no next."""
        return (not first) * self.previous + (not last) * self.next


class Home(NamedTuple):
    """The same in each of the two memories that codecs can use: the stage's device and the machine's own."""

    device: Sides
    host: Sides


def remembered_by_codecs(spec: RunSpec, windows: int | None = None) -> Home:
    """What codecs remember between steps. `windows`: how many samples the data has, where that is known."""
    return _by_home([(c, c.remembered_bytes(extent)) for c, extent in _legs(spec, windows)])


def memories_of_codecs(spec: RunSpec) -> dict[tuple[str, Leg], Mapping[str, Kept]]:
    """The same as tensors by name: of each leg, at a stage's end towards the previous stage and the next."""
    forward, backward = (codec.remembered(extent) for codec, extent in _legs(spec))
    return {
        ("previous", "forward"): forward.receiver,
        ("previous", "backward"): backward.sender,
        ("next", "forward"): forward.sender,
        ("next", "backward"): backward.receiver,
    }


def staged_by_codecs(spec: RunSpec) -> Home:
    """What codecs hold of a step that is not decided yet."""
    return _by_home([(c, c.staged_bytes(extent)) for c, extent in _legs(spec)])


def in_flight_of_codecs(spec: RunSpec) -> int:
    """What codecs hold at one end of each microbatch that is in flight."""
    return sum(codec.in_flight_bytes(extent) for codec, extent in _legs(spec))


def _by_home(legs: list[tuple[Codec, AtEnds]]) -> Home:
    """`legs`: forward, then backward."""
    device = [AtEnds() if codec.memory_on_host else held for codec, held in legs]
    host = [held if codec.memory_on_host else AtEnds() for codec, held in legs]
    return Home(_sides(*device), _sides(*host))


def _sides(forward: AtEnds, backward: AtEnds) -> Sides:
    """A stage receives activations from the previous stage and sends it gradients; towards the next, the reverse."""
    return Sides(previous=forward.receiver + backward.sender, next=forward.sender + backward.receiver)


def _legs(spec: RunSpec, windows: int | None = None) -> tuple[tuple[Codec, Extent], tuple[Codec, Extent]]:
    return _on(spec, "forward", windows), _on(spec, "backward", windows)


def _on(spec: RunSpec, leg: Leg, windows: int | None = None) -> tuple[Codec, Extent]:
    forward, backward = parse_codec(spec.wire.forward).codec, parse_codec(spec.wire.backward).codec
    extent = _extent(spec, windows)
    if leg == "backward":
        return backward, extent._replace(positions=forward.offered_positions(extent))
    return forward, extent


def _extent(spec: RunSpec, windows: int | None) -> Extent:
    if windows is None and spec.data.max_bytes is not None:
        windows = spec.data.max_bytes // spec.model.context
    seen = spec.steps * spec.batch.size
    return Extent(
        windows=spec.batch.size // spec.batch.microbatches,
        context=spec.model.context,
        width=spec.boundary_width,
        number_bytes=number_bytes(spec),
        microbatches=spec.batch.microbatches,
        samples=seen if windows is None else min(windows, seen),
    )
