"""Which peer is assigned which stage, and from what: its memory where every stage is still held, else a snapshot.

Every change of holders and every broken link goes through `regroup`: a new generation, in which all holders relink and
a step that was under way is redone. A stage in a peer's memory counts if it has applied exactly the decisions of this
lineage; if that is true of no peer, all stages are restored from the newest complete snapshot.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain, count

from protomodels_cli.coordinator import notices, outgoing, readiness, reasons, speeds, turns
from protomodels_cli.coordinator.departures import Departed, how_it_went, with_new
from protomodels_cli.coordinator.events import (
    CheckpointCut,
    CutCheckpoint,
    Dismiss,
    MakeSpare,
    SnapshotLost,
    Wait,
)
from protomodels_cli.coordinator.filling import MOST_COST
from protomodels_cli.coordinator.history import Forgot, History, Initialised, Mark, Placed, RolledBack
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.peers import Holding, Peer
from protomodels_cli.coordinator.placement import Placement
from protomodels_cli.coordinator.seats import Absent, Preparation, assigned
from protomodels_cli.coordinator.sharing import fill_on_cards, place_on_cards
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import voice_of
from protomodels_cli.coordinator.work import Unplaced, Working
from protomodels_cli.errors import EXIT_OUTSIDE
from protomodels_cli.protocol.parts import Part

HOUR = 3600.0
MOST_SECONDS = 1e6  # that a peer may be later than others, and still be asked before one that had its turn
MOST_SNAPSHOTS = 16  # a peer's parts of older snapshots do not count
MOST_SESSIONS = 8  # that a holder may open between two steps, where another peer can take its stage
MOST_RETURNS = 3  # of one holder during a task, for which the task has longer
DISMISS_AFTER = 6  # generations in a row that ended before a step was decided


def fresh(history: History) -> bool:
    """Nothing was ever trained: stages come from the seed or a checkpoint. The cut may still change in the former case
    only: a checkpoint is cut once."""
    return history.step == 0 and (history.lineage == 1 or not history.layers)


def _own_name(state: State, peer: Peer) -> str:
    """What it calls itself, with a number where another that is here is called so. A peer that comes back has the name
    that it had."""
    taken = {other.name for other in state.peers.values() if other.id != peer.id}
    had = state.name_of(peer.id)
    same = had == peer.name or re.fullmatch(rf"{re.escape(peer.name)}-\d+", had) is not None
    numbered = (f"{peer.name}-{number}" for number in count(2))
    wished = [had] if same else []
    return next(name for name in chain(wished, [peer.name], numbered) if name not in taken)


def _useful(history: History, parts: frozenset[Part]) -> frozenset[Part]:
    """Those of the last snapshots: of each it is asked whether it is there, and one peer may name thousands."""
    last = {mark.key for mark in (*history.snapshots[-MOST_SNAPSHOTS:], *history.pending)}
    return frozenset(part for part in parts if part.snapshot in last)


def join(moves: Moves, peer: Peer) -> None:
    """A peer joined or reconnected."""
    state, held = moves.state, peer.holding
    peer = replace(peer, name=_own_name(state, peer), parts=_useful(state.history, peer.parts))
    # In a lineage that a lost coordinator led too, that one may have given a peer a stage: no lie, and of no use.
    known = state.history.lineage > state.history.reserved
    if held is not None and held.lineage == state.history.lineage and peer.id not in state.history.held and known:
        why = reasons.FalseClaim(held.stage)
        moves.do(Dismiss(peer.id, why, EXIT_OUTSIDE))
        moves.tell(notices.PeerDismissed(peer.id, peer.name, None, why))
        return
    again = peer.id in state.peers or peer.id in state.seats.absent
    was_holder = state.stage_of(peer.id) is not None
    had_it = peer.id in state.seats.holds or peer.id in state.seats.absent
    moves.know(peer)
    moves.seats = moves.seats.rejoined(peer.id)
    moves.state = replace(moves.state, departed={p: departed for p, departed in state.departed.items() if p != peer.id})
    if not was_holder:  # with the session before it went what it was told to build
        if peer.id in state.seats.preparing:
            moves.conduct = replace(moves.conduct, turns=turns.after_another(moves.state, peer.id, "spare", moves.now))
        moves.seats = moves.seats.without([peer.id])
    if (absent := state.seats.absent.get(peer.id)) is not None:
        longest = max(moves.now - absent.since, state.conduct.longest.get(peer.id, 0.0))
        moves.conduct = replace(moves.conduct, longest={**state.conduct.longest, peer.id: longest})
    if was_holder or absent is not None:
        _note_return(moves, peer.id, absent)
    kind = notices.PeerReturned if again else notices.PeerJoined
    moves.tell(kind(peer.id, peer.name, peer.device, peer.person))
    if _is_in_its_generation(state, peer):
        assert peer.holding is not None
        moves.seats = moves.seats.taken(peer.holding.stage, peer.id)
        moves.measured = replace(moves.measured, decided_at=())
        moves.do(outgoing.go_on(moves.state, peer.id))
    elif not state.placed or was_holder:
        if is_current(state.history, peer.holding):
            assert peer.holding is not None
            if state.history.holders[peer.holding.stage] == peer.id:
                moves.seats = moves.seats.taken(peer.holding.stage, peer.id)
        elif had_it and not fresh(state.history):  # a process may end, but not often
            moves.conduct = replace(
                moves.conduct,
                untried=state.conduct.untried | {peer.id},
                turns=turns.after_another(moves.state, peer.id, "stage", moves.now),
            )
        regroup(moves)
    else:  # which drops what it may have built ahead
        moves.seats = moves.seats.without([peer.id])
        make_spare(moves, peer.id, reasons.AllStagesHeld(state.stages))
    _part_with_the_restless(moves)


def _note_return(moves: Moves, peer: str, absent: Absent | None) -> None:
    """The task at hand has as much longer as it was away; not for ever, or a peer could keep it from ending."""
    work, times = moves.work, moves.conduct.returns.get(peer, 0) + 1
    if absent is not None and isinstance(work, Working) and times <= MOST_RETURNS:
        since = max(absent.since, work.task.started, work.waited_until)
        moves.work = replace(work, waited=work.waited + max(0.0, moves.now - since), waited_until=moves.now)
    moves.conduct = replace(moves.conduct, returns={**moves.conduct.returns, peer: times})


def _part_with_the_restless(moves: Moves) -> None:
    """Holders that come and go again and again, before a step is done, give their stages up where others can take them:
    each time all others wait, or link anew."""
    state, holders = moves.state, moves.state.history.holders
    restless = {peer: times for peer in holders if (times := state.conduct.returns.get(peer, 0)) > MOST_SESSIONS}
    waited_for = state.seats.given_up(restless)
    others = [peer for peer in state.peers if peer not in restless and not turns.weight(state, peer, moves.now)]
    if restless and _could_go_on_without(replace(state, seats=waited_for), moves.now, restless, others):
        moves.seats = waited_for
        why = {p: reasons.CameAndWent(holders.index(p), times) for p, times in restless.items()}
        stand_aside(moves, why)


def make_spare(moves: Moves, peer: str, why: reasons.Spare) -> None:
    """A peer that rests hears of that, and of nothing else."""
    known = moves.state.peers.get(peer)
    moves.do(MakeSpare(peer, why if known is None or known.rest is None else reasons.Resting()))


def _is_in_its_generation(state: State, peer: Peer) -> bool:
    """Does it still work on what the others work on? Then nothing is done again."""
    held, task = peer.holding, state.task
    if held is None or held.generation != state.history.generation or state.stage_of(peer.id) != held.stage:
        return False
    return is_current(state.history, held) and (task is None or task.kind not in ("build", "link"))


def is_current(history: History, holding: Holding | None) -> bool:
    """Has the stage applied exactly the decisions of this lineage, or all but the last, which it is prepared for?"""
    if holding is None or (holding.lineage, holding.layers) != (history.lineage, history.layers):
        return False
    if holding.applied == history.step:
        return True
    last = history.decision
    return last is not None and holding.applied == last.step - 1 and holding.prepared == last.generation


def lose(moves: Moves, gone: Mapping[str, reasons.Loss]) -> None:
    """These peers are gone, and what they had in memory."""
    needed = _are_needed(moves.state, gone)
    part_with(moves, gone)
    if needed:
        regroup(moves)


def _are_needed(state: State, gone: Iterable[str]) -> bool:
    """Whether the stages are assigned again without these peers. While nobody is placed, every peer counts."""
    here = [peer for peer in gone if peer in state.peers]
    return any(peer in state.seats.holds or state.stage_of(peer) is not None or not state.placed for peer in here)


def part_with(moves: Moves, gone: Mapping[str, reasons.Loss], absent: Absent | None = None) -> None:
    """The same, and nothing is assigned again. `absent`: the one that is gone, where it is waited for."""
    state = moves.state
    lost = [known for peer in gone if (known := state.peers.get(peer)) is not None]
    for peer in lost:
        preparation = state.seats.preparing.get(peer.id)
        if preparation is not None and state.stage_of(peer.id) is None and not preparation.ready:
            moves.conduct = replace(moves.conduct, turns=turns.after_another(moves.state, peer.id, "spare", moves.now))
    moves.state = replace(
        moves.state,
        peers={i: p for i, p in state.peers.items() if i not in gone},
        leaving=state.leaving - gone.keys(),
        departed=with_new(state.departed, _departed(moves, gone), state.history.holders),
    )
    if absent is not None:
        moves.seats = moves.seats.missed(state.seats.holds[absent.peer], absent)
    moves.seats = moves.seats.without(gone.keys())
    for peer in lost:
        moves.tell(_parting(peer, state.stage_at(peer.id), gone[peer.id]))


def _departed(moves: Moves, gone: Mapping[str, reasons.Loss]) -> dict[str, Departed]:
    state, found = moves.state, dict[str, Departed]()
    for peer, why in gone.items():
        known = state.peers.get(peer) or state.departed.get(peer)
        if known is not None and not isinstance(why, reasons.AskedToRest):  # which keeps its session
            found[peer] = Departed(known.name, how_it_went(why), moves.now)
    return found


def _parting(peer: Peer, stage: int | None, why: reasons.Loss) -> notices.Notice:
    match why:
        case reasons.AskedToLeave():
            return notices.PeerLeft(peer.id, peer.name, stage)
        case reasons.AskedToRest(until):
            return notices.PeerRests(peer.id, peer.name, stage, until)
        case reasons.NoHeartbeat() | reasons.ConnectionClosed() | reasons.NotRenewed():
            return notices.PeerLost(peer.id, peer.name, stage, why)
        case _:
            return notices.PeerDismissed(peer.id, peer.name, stage, why)


def dismiss(moves: Moves, what: reasons.Fault, *peers: str) -> None:
    """Whether they are here or waited for: who is away when a lie of it is found must not come back with its stage."""
    absent = moves.seats.absent.keys() & set(peers)
    needed = bool(absent) or _are_needed(moves.state, peers)
    for peer in (p for p in peers if p in moves.state.peers or p in absent):
        moves.do(Dismiss(peer, what, EXIT_OUTSIDE))
    moves.seats = moves.seats.given_up(absent)
    part_with(moves, dict.fromkeys(peers, what))
    if needed:  # once, however many go: every call opens a generation
        regroup(moves)


def stand_aside(moves: Moves, gone: Mapping[str, reasons.Fault]) -> None:
    """These holders give their stages up, and are spares that are asked last. Nobody is dismissed."""
    state = moves.state
    here = {peer: why for peer, why in gone.items() if peer in state.peers}
    for peer, why in here.items():
        moves.tell(notices.StageGivenUp(peer, state.name_of(peer), state.stage_at(peer), why))
    moves.conduct = replace(moves.conduct, turns=turns.after(state, here, moves.now))
    moves.seats = moves.seats.without(here)
    regroup(moves)


def assign_again(moves: Moves, what: reasons.Complaint | reasons.PartUnreadable, *peers: str) -> None:
    """Assign all stages again, in a new generation; after several tries, dismiss these peers, where all of them are
    one person's. Otherwise it is one person's word against another's."""
    broken = moves.state.broken + 1
    moves.state = replace(moves.state, broken=broken)
    if broken >= DISMISS_AFTER and are_one_persons(moves.state, *peers):
        dismiss(moves, what, *dict.fromkeys(peers))
        return
    state, peer = moves.state, peers[0]
    trouble = notices.Relinking(peer, state.name_of(peer), state.stage_of(peer), what)
    moves.state = replace(moves.state, trouble=trouble)
    moves.tell(trouble)
    regroup(moves)


def are_one_persons(state: State, *peers: str) -> bool:
    """Whether these peers have one voice, as far as they are known."""
    known = [state.peers.get(peer) or state.conduct.parties.get(peer) for peer in peers]
    return len({voice_of(peer) for peer in known if peer is not None}) == 1 and None not in known


def regroup(moves: Moves) -> None:
    """Assign the stages to the peers that are here, if they suffice; otherwise tell them what is missing."""
    _end_generation(moves)
    history = moves.state.history
    if history.over:
        return
    if fresh(history):
        _assign_afresh(moves)
        return
    held = moves.seats.held
    absent = [stage for stage in range(len(history.layers)) if stage not in held]
    expected = [stage for stage, peer in enumerate(history.holders) if peer in moves.seats.absent]
    must_go_back = history.newest.step != history.step and not set(absent) <= set(expected)
    if absent and moves.seats.absent and not must_go_back:
        _wait(moves, reasons.HoldersDisconnected(tuple(absent)))
        return
    found = fill(moves.state, held, moves.now)
    if not isinstance(found, dict):
        _wait(moves, found)
        return
    found = _without_accusers(moves.state, held, found, moves.now)
    if absent and history.newest.step != history.step:
        roll_back(moves, history.newest, reasons.StagesLost(tuple(absent), history.step))
    _assign(moves, history.layers, {**held, **found})


def reseat(moves: Moves, stage: int, peer: str) -> None:
    """Give this stage to another peer, from the snapshot of the last step. All others go on from memory; who held it
    keeps it in memory until the first step with the other is done."""
    history = moves.state.history
    before = history.holders[stage]
    _end_generation(moves)
    moves.seats = moves.seats.without([before])
    _assign(moves, history.layers, {**dict(enumerate(history.holders)), stage: peer}, former=(stage, before))
    moves.do(Wait(before, reasons.StageTried(stage, moves.state.name_of(peer))))


def trust(moves: Moves) -> None:
    """A step is done: its holders have shown that they can do it."""
    former = moves.seats.former
    if former is not None and former[1] in moves.state.peers:
        make_spare(moves, former[1], reasons.AllStagesHeld(moves.state.stages))
    moves.conduct = replace(moves.conduct, untried=frozenset())
    moves.seats = moves.seats.without_former()


def _end_generation(moves: Moves) -> None:
    state = moves.state
    moves.conduct = replace(moves.conduct, speeds={**state.conduct.speeds, **speeds.measured(state)})
    moves.measured = replace(moves.measured, timed=())
    moves.work = Unplaced()
    moves.seats = moves.seats.closed(state.peers.keys())
    moves.state = replace(moves.state, took_basis=frozenset())
    moves.measured = replace(moves.measured, usage={}, decided_at=())


def fill(state: State, held: Mapping[int, str], now: float) -> dict[int, str] | reasons.StagesWithoutPeer:
    """Holders for the other stages, from the peers without a stage: those who could go on the soonest, with what they
    would make an hour of steps longer."""
    slower = functools.cache(functools.partial(speeds.slower, state))

    def cost(peer: str, stage: int) -> float:
        if has_accused(state, peer, stage):
            return MOST_COST
        seconds = readiness.seconds_left(state, peer, stage, now) + HOUR * slower(stage).get(peer, 0.0)
        if readiness.is_ready(state, peer, stage):
            return min(seconds, MOST_SECONDS)
        return min(seconds, MOST_SECONDS) + MOST_SECONDS * (
            turns.weight(state, peer, now) + turns.delays(state, peer, now)
        )

    return fill_on_cards(state.spec, state.history.layers, held, state.peers.values(), cost)


def has_accused(state: State, peer: str, stage: int) -> bool:
    """Whether this peer's voice accused a holder of this stage: it would gain by a lie."""
    known = state.peers.get(peer)
    return known is not None and voice_of(known) in state.conduct.accusers.get(stage, ())


def _without_accusers(state: State, held: Mapping[int, str], found: dict[int, str], now: float) -> dict[int, str]:
    """The same, but where only its accusers could take a stage, another holder takes it, and one of them that
    holder's: nobody gets a seat that it accused, unless nobody else has the memory for it."""

    def has_none(found: dict[int, str]) -> bool:
        return not any(has_accused(state, peer, stage) for stage, peer in found.items())

    if has_none(found):
        return found
    for moved in held:
        other = fill(state, {stage: peer for stage, peer in held.items() if stage != moved}, now)
        if isinstance(other, dict) and has_none(other):
            return other
    return found


def are_replaceable(state: State, now: float, *holders: str) -> bool:
    """Whether others who are here could hold their stages in their place."""
    return _could_go_on_without(state, now, holders, state.peers)


def is_replaceable_after_its_turn(state: State, now: float, holder: str, equal: bool = False) -> bool:
    """The same, by peers that had fewer turns than this holder once it has had this one, or `equal`ly many."""
    had = turns.after(state, [holder], now)
    most = turns.count(had, state, holder, now) - (not equal)
    fewer = [peer for peer in state.peers if turns.count(had, state, peer, now) <= most]
    return _could_go_on_without(state, now, [holder], fewer)


def _could_go_on_without(state: State, now: float, holders: Collection[str], others: Collection[str]) -> bool:
    if state.stands_still or not set(holders) <= set(state.history.holders):
        return False
    held = {stage: peer for stage, peer in enumerate(state.history.holders) if peer not in holders}
    peers = {i: peer for i, peer in state.peers.items() if i not in holders and (i in others or i in held.values())}
    return isinstance(fill(replace(state, peers=peers), held, now), dict)


def roll_back(moves: Moves, mark: Mark, why: reasons.Rollback, answered: int = 0) -> None:
    """Continue from this snapshot: no stage in a peer's memory counts any more."""
    history = moves.state.history
    redo = history.step - mark.step
    moves.record(RolledBack(history.highest_lineage + 1, mark.lineage, mark.step, why, answered))
    moves.seats = moves.seats.emptied()
    moves.state = replace(moves.state, undelivered=False)
    moves.saving = replace(moves.saving, whole={}, unsaved=None)
    moves.do(outgoing.keep(moves.state))
    moves.tell(notices.RolledBack(why, mark.step, redo, history.highest_lineage + 1))


def _assign_afresh(moves: Moves) -> None:
    state, cut = moves.state, moves.state.history.newest.layers
    spec = state.spec.model_copy(update={"stages": list(cut)}) if cut else state.spec
    had = {i: turns.weight(state, i, moves.now) for i in state.peers}
    for most in sorted(set(had.values()) or {0.0}):  # who gave up a stage is placed where the others do not suffice
        found = place_on_cards(spec, [peer for i, peer in state.peers.items() if had[i] <= most])
        if isinstance(found, Placement):
            break
    moves.seats = moves.seats.emptied().given_up(moves.seats.absent)
    if isinstance(found, Placement):
        _assign(moves, found.layers, dict(enumerate(found.holders)))
        return
    moves.work = Unplaced(found)
    for peer in state.peers:
        make_spare(moves, peer, found)


def _assign(moves: Moves, layers: tuple[int, ...], held: dict[int, str], former: tuple[int, str] | None = None) -> None:
    """`former`: a stage that another peer tries, and who keeps it in memory meanwhile."""
    state = moves.state
    holders = tuple(held[stage] for stage in range(len(layers)))
    if (
        state.spec.model.init is not None
        and not state.history.newest.parts
        and not state.seats.holds.keys() >= set(holders)
    ):
        _cut(moves, layers, state.spec.model.init)
        return
    generation = state.history.generation + 1
    moves.record(Placed(generation, layers, tuple((peer,) for peer in holders)))
    reuse = {peer for stage, peer in enumerate(holders) if state.seats.holds.get(peer) == stage}
    stay = {peer for peer, before in zip(holders, state.history.holders, strict=False) if peer == before}
    # Peers that reuse their memory hold their stage at once; the others once they report it.
    building = {peer: _preparation(moves, peer, stage) for stage, peer in enumerate(holders) if peer not in reuse}
    fetches = sum(preparation.here is None for preparation in building.values())
    moves.state = replace(moves.state, undelivered=False, fetches=fetches)
    moves.seats = assigned(holders, building, former)
    task = moves.begin("build", state.history.step)
    for stage, peer in enumerate(holders):
        moves.do(outgoing.assign(moves.state, stage, task, peer in reuse))
    seated = set(holders)
    moves.conduct = replace(
        moves.conduct, untried=frozenset(seated - (reuse | stay) | (seated & state.conduct.untried))
    )
    for peer in state.peers:
        if peer not in seated and (former is None or peer != former[1]):
            make_spare(moves, peer, reasons.AllStagesHeld(len(holders)))
    moves.tell(notices.StagesAssigned(generation, layers, moves.state.holders_of(range(len(layers)))))


def _preparation(moves: Moves, peer: str, stage: int) -> Preparation:
    """Who builds a stage goes on with it, should all be assigned again meanwhile."""
    state, part = moves.state, readiness.wanted(moves.state.history, stage)
    before = state.seats.preparing.get(peer)
    if before is not None and before.part == part:
        return before
    return Preparation(part, moves.now, moves.now if readiness.is_here(state, peer, part) else None)


def _cut(moves: Moves, layers: tuple[int, ...], checkpoint: str) -> None:
    """What some stages are to begin with lies in the checkpoint still."""
    if not moves.state.cutting:
        moves.state = replace(moves.state, cutting=True)
        moves.do(CutCheckpoint(layers))
    _wait(moves, reasons.CheckpointUncut(checkpoint))


def take_first_snapshot(moves: Moves, event: CheckpointCut) -> None:
    moves.state = replace(moves.state, cutting=False)
    moves.record(Initialised(event.layers, event.parts, event.source))
    moves.do(outgoing.keep(moves.state))
    path = moves.state.spec.model.init or ""
    moves.tell(notices.CheckpointCut(path, event.source, event.layers, event.tied))
    if not moves.state.placed:
        regroup(moves)


def _wait(moves: Moves, what: reasons.Missing) -> None:
    """Whoever builds a stage goes on with that, in time that is measured from when it was told first: it may be wanted
    all the more."""
    history = moves.state.history
    wanted = {readiness.wanted(history, stage) for stage in range(len(history.layers))}
    building = {p: at for p, at in moves.seats.preparing.items() if at.part in wanted or p not in history.holders}
    moves.work = Unplaced(what)
    moves.seats = moves.seats.stood_down(moves.seats.preparing.keys() - building.keys())
    for peer in moves.state.peers:
        if peer in moves.seats.holds:
            moves.do(Wait(peer, what))
        elif peer not in building:
            make_spare(moves, peer, what)
        elif peer in history.holders:
            moves.do(outgoing.prepare(moves.state, peer, building[peer].part))


def lose_snapshot(moves: Moves, event: SnapshotLost) -> None:
    """A stage's part is damaged wherever it was looked for: what it belongs to is worth nothing. If it is only the peer
    that cannot read it, it may try again, a few times."""
    state, history = moves.state, moves.state.history
    known = state.stage_of(event.peer) is not None and event.generation == history.generation
    snapshot = (event.lineage, event.step)
    if not known or snapshot not in [m.key for m in history.snapshots if m.parts]:
        return
    if event.whole_here:
        if event.peer in state.peers:  # it may have left while its word was checked
            assign_again(moves, reasons.PartUnreadable(event.step), event.peer)
        return
    if snapshot == history.snapshots[0].key:
        return  # there is nothing before it: the coordinator ends
    moves.tell(notices.SnapshotUnusable(event.step, event.why))
    moves.record(Forgot(*snapshot, unusable=True))
    roll_back(moves, moves.state.history.newest, reasons.SnapshotDamaged(event.step))
    regroup(moves)
