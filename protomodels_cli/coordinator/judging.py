"""Who audits whom, what follows from what auditors find, and why a stage is not audited. Pure: `draw` is handed in.

Words are counted by voice (voices.py), and weighed by who contradicts whom (contradictions.py). A word counts while the
peer that gave it is in the run. It must not know messages, futures or the network.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from protomodels_cli.coordinator import audit_notices as told
from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts
from protomodels_cli.coordinator.contradictions import Contradictions, quorum
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.sharing import fits_beside
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import are_independent, voice_of
from protomodels_cli.protocol.audit import Compared

PATIENCE = 2  # audits in a row without a result, after which others are asked first


@dataclass
class Hearing:
    """One audit: a stage's messages in one step, and what the auditors that were asked found."""

    stage: int
    step: int
    layers: tuple[int, ...]
    holders: tuple[str, ...]
    suspect: Peer
    asked: list[Peer] = field(default_factory=list)
    accusers: list[Peer] = field(default_factory=list)
    clearers: list[Peer] = field(default_factory=list)
    lies: tuple[Compared, ...] = ()

    @property
    def failed(self) -> AuditFailed:
        worst = max(self.lies, key=lambda one: one.wild / max(1, one.numbers))
        names = tuple(peer.name for peer in self.accusers)
        return AuditFailed(self.stage, self.step, worst.leg, worst.wild, worst.numbers, names)


@dataclass
class Judge:
    words: Contradictions = field(default_factory=Contradictions)
    untrusted: set[str] = field(default_factory=set)  # voices that lied: they are not asked again
    _silent: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # voice → audits in a row without result
    _watched: dict[str, set[str]] = field(default_factory=dict)  # accused peer → voices that were asked about it since
    _names: dict[str, list[str]] = field(default_factory=dict)  # accused peer → who accused it
    _found: dict[str, AuditFailed] = field(default_factory=dict)  # accused peer → the last that was found
    _ids: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # voice → peers that said something

    # Who is asked

    def auditors(self, state: State, hearing: Hearing, draw: random.Random) -> Iterator[Peer]:
        """Spares that could hold this stage, independent of its holder and of all that were asked: at random, one of
        each voice. Those that have not spoken on an accused peer come first, those that came to no result last."""
        by_voice: dict[str, list[Peer]] = defaultdict(list)
        for peer in self._independent(state, hearing):
            if not _is_busy(state, peer):
                by_voice[voice_of(peer)].append(peer)
        voices = sorted(by_voice)
        draw.shuffle(voices)
        heard = self._watched.get(hearing.suspect.id, set())
        voices.sort(key=lambda voice: (self._silent[voice] >= PATIENCE, voice in heard))
        for voice in voices:
            draw.shuffle(by_voice[voice])
            if (found := next((p for p in by_voice[voice] if _fits(state, hearing, p)), None)) is not None:
                yield found

    def why_nobody(self, state: State, hearing: Hearing) -> told.WhyNot:
        able = [peer for peer in _spares(state, hearing) if _fits(state, hearing, peer)]
        if not able:
            return "no_spare"
        independent = {peer.id for peer in self._independent(state, hearing)}
        return "spares_busy" if any(peer.id in independent for peer in able) else "no_independent"

    def _independent(self, state: State, hearing: Hearing) -> Iterator[Peer]:
        for peer in _spares(state, hearing):
            others = (hearing.suspect, *hearing.asked)
            if voice_of(peer) not in self.untrusted and all(are_independent(peer, other) for other in others):
                yield peer

    def wants(self, state: State, hearing: Hearing, draw: random.Random) -> bool:
        """Whether this stage's holder is watched, and a voice is there that has not spoken on it."""
        heard = self._watched.get(hearing.suspect.id)
        return heard is not None and any(voice_of(p) not in heard for p in self.auditors(state, hearing, draw))

    # What they find

    def no_result(self, auditor: Peer) -> None:
        self._silent[voice_of(auditor)] += 1

    def take(self, hearing: Hearing, auditor: Peer, compared: Sequence[Compared]) -> list[told.AboutAudits]:
        """One auditor's word."""
        voice, suspect, notices = voice_of(auditor), hearing.suspect, list[told.AboutAudits]()
        self._silent.pop(voice, None)
        lies = tuple(one for one in compared if one.is_lie)
        (hearing.accusers if lies else hearing.clearers).append(auditor)
        if suspect.id in self._watched:
            self._watched[suspect.id].add(voice)
        if not hearing.accusers:
            return notices
        hearing.lies = lies or hearing.lies
        for peer in (suspect, *hearing.accusers, *hearing.clearers):
            self._ids[voice_of(peer)].add(peer.id)
        accusers, clearers = ([voice_of(p) for p in ps] for ps in (hearing.accusers, hearing.clearers))
        self.words = self.words.accused(voice_of(suspect), accusers, clearers)
        names = self._names.setdefault(suspect.id, [])
        if lies and auditor.name not in names:
            names.append(auditor.name)
            notices.append(told.StageAccused(suspect.id, suspect.name, hearing.failed))
        self._found[suspect.id] = hearing.failed
        if hearing.clearers and len(hearing.accusers if lies else hearing.clearers) == 1:
            by = hearing.clearers[0].name
            notices.append(told.AuditorsDisagree(suspect.id, suspect.name, by, hearing.failed))
        return notices

    def is_over(self, state: State, hearing: Hearing) -> bool:
        """Whether nobody else need be asked."""
        if not hearing.accusers:
            needed = quorum(len(self._present(state, hearing.suspect))) if hearing.suspect.id in self._watched else 1
            return len(hearing.clearers) >= needed
        liars = self._liars(state, hearing)
        return voice_of(hearing.suspect) in liars or all(voice_of(peer) in liars for peer in hearing.accusers)

    def conclude(self, state: State, hearing: Hearing) -> tuple[list[told.AboutAudits], list[events.Trouble]]:
        """What is told, and who is dismissed, once all were asked and one at least has spoken."""
        suspect = hearing.suspect
        if not hearing.accusers:
            by = hearing.clearers[0].name
            return [told.StageAudited(hearing.stage, hearing.step, suspect.id, suspect.name, by)], []
        present, liars = self._present(state, suspect), self._liars(state, hearing)
        dismissed = [
            events.Trouble(peer, self._reason(peer, voice, present))
            for voice in sorted(liars)
            for peer in sorted(self._ids.pop(voice, ()))
        ]
        against = self.words.against(voice_of(suspect), present)
        self.words, self.untrusted = self.words.without(liars), self.untrusted | liars
        self._forget(*(trouble.peer for trouble in dismissed))
        if voice_of(suspect) in liars:
            return [], dismissed
        if not against - liars:  # nobody accuses it that could be believed
            self._forget(suspect.id)
            return [], dismissed
        before = self._watched.get(suspect.id)
        heard = {voice_of(peer) for peer in (*hearing.accusers, *hearing.clearers)}
        self._watched[suspect.id] = (before or set()) | heard
        if before is not None and heard <= before:
            return [], dismissed
        why = self._failed(suspect.id)
        return [told.HolderWatched(suspect.id, suspect.name, why, len(against), quorum(len(present)))], dismissed

    def _reason(self, peer: str, voice: str, present: frozenset[str]) -> AuditFailed | FalseVerdicts:
        if peer in self._found:
            return self._failed(peer)
        return FalseVerdicts(len(self.words.against(voice, present)), len(present))

    def _failed(self, peer: str) -> AuditFailed:
        return replace(self._found[peer], auditors=tuple(self._names[peer]))

    def _forget(self, *peers: str) -> None:
        for peer in peers:
            self._watched.pop(peer, None)
            self._names.pop(peer, None)
            self._found.pop(peer, None)

    def _present(self, state: State, suspect: Peer) -> frozenset[str]:
        """All voices in the run that can be believed. Who is accused counts, though it may be away for a moment."""
        return frozenset(map(voice_of, (*state.peers.values(), suspect))) - self.untrusted

    def _liars(self, state: State, hearing: Hearing) -> frozenset[str]:
        return self.words.liars(self._present(state, hearing.suspect))


def _spares(state: State, hearing: Hearing) -> Iterator[Peer]:
    holders = {*state.history.holders, *hearing.holders}
    return (peer for peer in state.peers.values() if peer.id not in holders and peer not in hearing.asked)


def _is_busy(state: State, peer: Peer) -> bool:
    return peer.id in state.seats.preparing or peer.id in state.leaving or peer.rest is not None


def _fits(state: State, hearing: Hearing, peer: Peer) -> bool:
    return fits_beside(state.spec, state.peers, hearing.layers, hearing.holders, hearing.stage, peer.id)
