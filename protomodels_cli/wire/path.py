"""The path of a link, in a word or two: how its two ends reach each other; and why one is not punched. The same in the
worker, on the wire, in the metrics and on the page."""

from __future__ import annotations

import re
from typing import Literal, get_args

PUNCHED = "punched"  # both ends connected at the same moment, through routers that let nobody in
_PATH = re.compile(r"loopback|lan|public|punched|door|relay [\w.:\[\]-]{1,80}")

NotPunched = Literal[
    "not_listening",  # one end is not to be dialled
    "not_seen",  # nobody outside has said where its port is seen
    "port_changes",  # its router shows two observers two ports, or addresses
    "other_address",  # it is seen at an address at which the coordinator has not seen it
    "no_answer",  # the neighbour did not answer the offer
    "not_opened",  # both tried, and nothing came through
]
OF_BOTH = ("no_answer", "not_opened")  # the others are about one end


def checked_path(text: str) -> str:
    """As another machine says; empty where it is none of them."""
    return text if _PATH.fullmatch(text) else ""


def is_relayed(path: str) -> bool:
    """Through a relay, or through the coordinator's door."""
    return path == "door" or path.startswith("relay ")


def told(why: NotPunched, here: bool) -> str:
    """Why a link is not punched, as one of its ends has it. `here`: it is about this end."""
    return why if why in OF_BOTH else f"{why}_{'here' if here else 'there'}"


_TOLD = frozenset(told(why, here) for why in get_args(NotPunched) for here in (True, False))


def checked_punch(text: str) -> str:
    """The same as another machine says; empty where it is none of them."""
    return text if text in _TOLD else ""
