"""Who did how much: the steps of each name, their tokens and seconds, and the bytes that it sent. From rows of metrics.

Pure, but for the file that it is read back from. Names are what peers call themselves. Steps that were redone count
again, since they were computed. There is room for so many names; further ones are counted together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protomodels_cli.observe.metrics import rows_from_last

MOST_NAMES = 200
MOST_BYTES = 2**63 - 1
OTHERS = ""
EVERY = 500  # steps between two rows with the sums, so that no more than these are read after a restart
EVENT = "contributions"


@dataclass(frozen=True)
class Contribution:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0

    def plus(self, steps: int, tokens: int, seconds: float, sent_bytes: int) -> Contribution:
        sent = min(self.sent_bytes + sent_bytes, MOST_BYTES)  # a peer says how much it sent
        return Contribution(self.steps + steps, self.tokens + tokens, self.seconds + seconds, sent)


class Contributions:
    def __init__(self, of: Mapping[str, Contribution] | None = None):
        self._of, self._since = dict(of or {}), 0

    def add(self, row: Mapping[str, Any]) -> bool:
        """A step's row of metrics. Whether it is time to write the sums down."""
        holders, seconds, stages = row.get("holders"), row.get("seconds"), row.get("stages")
        if not isinstance(holders, list) or not isinstance(stages, dict):
            return False
        sent = zip(stages["forward_bytes"], stages["backward_bytes"], strict=True)
        for name, (forward, backward) in zip(holders, sent, strict=True):
            known = name if name in self._of or len(self._of) < MOST_NAMES else OTHERS
            before = self._of.get(known, Contribution())
            self._of[known] = before.plus(1, row["tokens"], seconds or 0.0, forward + backward)
        self._since += 1
        return self._since >= EVERY

    def sums(self) -> dict[str, Contribution]:
        """The largest first; of those without room in the list, last."""
        return dict(sorted(self._of.items(), key=lambda item: (item[0] == OTHERS, -item[1].steps, item[0])))

    def row(self, lineage: int, step: int) -> dict[str, Any]:
        """The sums, to be written down now."""
        self._since = 0
        of = {name: [c.steps, c.tokens, round(c.seconds, 3), c.sent_bytes] for name, c in self._of.items()}
        return {"event": EVENT, "lineage": lineage, "step": step, "of": of}


def read(metrics: Path) -> Contributions:
    """As the rows of the file tell. Damaged ones count for nothing. Blocks."""
    later, found = list[dict[str, Any]](), Contributions()
    try:
        for row in rows_from_last(metrics):
            if row.get("event") == "step" and "holders" in row:
                later.append(row)
            elif row.get("event") == EVENT and (sums := _sums(row.get("of"))) is not None:
                found = Contributions(sums)
                break
    except OSError:
        pass
    for row in reversed(later):
        try:
            found.add(row)
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _sums(of: Any) -> dict[str, Contribution] | None:
    try:
        return {str(name): Contribution(int(a), int(b), float(c), int(d)) for name, (a, b, c, d) in of.items()}
    except (AttributeError, TypeError, ValueError):
        return None
