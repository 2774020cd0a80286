"""Why a link is relayed, or punched, as data. `stage`: the earlier one's. `punch`: why it is not punched, as
wire/path.py has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NobodyLetIn:
    """Neither end has been reached from outside, and they are not behind one router."""

    stage: int
    punch: str = ""
    kind: Literal["nobody_let_in"] = "nobody_let_in"


@dataclass(frozen=True)
class NoDirectAnswer:
    """One of them should be reachable for the other, and is not, or not any more."""

    stage: int
    punch: str = ""
    kind: Literal["no_direct_answer"] = "no_direct_answer"


@dataclass(frozen=True)
class Punched:
    """Nobody lets the other in, and both connected at the same moment."""

    kind: Literal["punched"] = "punched"


NotDirect = NobodyLetIn | NoDirectAnswer | Punched
