"""How wide a subspace may be for a given number of bytes: the labs compare wires at equal ones."""

from __future__ import annotations

from protomodels_cli.codecs.base import Extent
from protomodels_cli.codecs.registry import parse_codec

RATIOS = (30, 100)  # × fewer bytes than fp32, at least
# Codecs whose rows have all seeds, as those in int8 with a scale's own k do.
BY_RATIO = {30: ("eden:6",), 100: ("eden:3 then eden:5", "eden:4")}
FIRST = {ratio: codecs[0] for ratio, codecs in BY_RATIO.items()}
LEGS = (
    "eden:6",
    "eden:3 then eden:5",
    "eden:4",
    "eden:3",
    "eden:4|eden:2",
    "eden:4|eden:1",
    "eden:3|eden:1",
)  # gradients in as many bits, or in fewer
ID_BYTES = 2  # of a token's id, which goes along
TOKENS = 1 << 12  # of the message that is measured
ALIGNED = 64  # from here on k is a multiple of 8, which GPUs are faster with, unless numbers are less than a byte


def legs(codec: str) -> tuple[str, str]:
    """Forward and backward, of `both` or `forward|backward`."""
    forward, _, backward = codec.partition("|")
    return forward, backward or forward


def bytes_a_token(codec: str, k: int) -> float:
    """Both ways over a boundary, with scales and the token's id."""
    extent = Extent(1, TOKENS, k, 4, 1, 1)
    return sum(parse_codec(leg).codec.message_bytes(extent) for leg in legs(codec)) / TOKENS + ID_BYTES


def k_for(width: int, ratio: float, codec: str) -> int:
    """The largest even k with which the codec sends so much less than fp32; at least 2."""
    k = 2
    while 8 * width / bytes_a_token(codec, k + 2) >= ratio:
        k += 2
    return k - k % 8 if k >= ALIGNED and bytes_a_token(codec, k) >= 2 * k else k
