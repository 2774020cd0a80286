"""Which voices contradict each other about what crossed a boundary, and who lies if a third of all lie at most. Pure.

Of two voices that contradict each other one lies. So an honest voice is contradicted by liars only, and a voice that
more than a third of all contradict is a liar itself. No vote of liars alone can reach that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

LEAST = 2  # one word is never enough


def quorum(voices: int) -> int:
    """How many voices it takes to contradict one of so many, before that one counts as a liar."""
    return max(LEAST, voices // 3 + 1)


@dataclass(frozen=True)
class Contradictions:
    pairs: frozenset[frozenset[str]] = frozenset()

    def accused(self, suspect: str, accusers: Collection[str], clearers: Collection[str]) -> Contradictions:
        """These found a lie of the suspect, and those none in the same messages. Its messages are its own word."""
        new = {frozenset((one, other)) for one in accusers for other in (suspect, *clearers) if one != other}
        return Contradictions(self.pairs | new)

    def against(self, voice: str, present: Collection[str]) -> frozenset[str]:
        return frozenset(other for pair in self.pairs if voice in pair for other in pair - {voice} if other in present)

    def liars(self, present: Collection[str]) -> frozenset[str]:
        needed = quorum(len(present))
        named = frozenset[str]().union(*self.pairs)
        return frozenset(voice for voice in named if len(self.against(voice, present)) >= needed)

    def without(self, voices: Collection[str]) -> Contradictions:
        return Contradictions(frozenset(pair for pair in self.pairs if pair.isdisjoint(voices)))
