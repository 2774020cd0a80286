"""`--link` of commands that forecast: the line that everybody is taken to have. A bare rate has a home line's delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pages of help come without the schema
    from protomodels_cli.spec.schema import LinkSpec

DELAY = "25ms"  # each way, where nobody says it
LINE = f"20mbit,{DELAY}"  # where nobody says anything
HELP = f"BANDWIDTH,LATENCY as in 80mbit,25ms; without a latency {DELAY}. Default: {LINE}."


def line_of(text: str) -> LinkSpec:
    from protomodels_cli.spec.link import parse_link

    link = parse_link(text)
    return link if is_whole(text) else link.model_copy(update={"latency": DELAY})


def is_whole(text: str) -> bool:
    """Whether it says the delay too; `none` is no limit and no delay."""
    return "," in text or text.strip().lower() == "none"


def as_option(link: LinkSpec) -> str:
    return f"{link.bandwidth or 'none'},{link.latency}"
