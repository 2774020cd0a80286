"""The simulated peer answers the coordinator as the real session does: the same scripts for both.

What the simulation finds out about the machine is worth as much as its peers are like the real ones. Each script is a
run of coordinator messages to a peer of a run with one stage, each with what has to be answered; it is fed to the
simulated peer and to a real session with a real engine, over a real stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import make_spec
from scripted import Again, Answer, DiskFull, HangUp, Lost, RealPeer, Rot, SimulatedPeer
from simulated_words import Assignment, Keep, NewBasis, Turn
from waiting import until

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.history import Decided, Mark
from protomodels_cli.protocol.parts import Part

SPEC = make_spec(
    stages=1,
    steps=6,
    subspace={"update": {"interval": 2, "window": 1, "delay": 1}},
    snapshots={"interval": 2, "warm_spares": True},
    limits={"lease_seconds": 60.0},
)
LAYERS = (4,)
BEGINNING = Mark(1, 0, 0, "u0")
SPARE, HOLD_ON = ev.MakeSpare("p", reasons.NoPeers()), ev.Wait("p", reasons.NoPeers())
GOOD_BYE = ev.Dismiss("p", reasons.RunFinished())


def assign(generation: int, task: int, step: int = 0, decided: int = 0, owed: int = 0, **how: Any) -> Assignment:
    """Fresh, unless it says reuse=True or restores the snapshot of a step."""
    mark = Mark(1, how["restore"], 0, "u0", parts=("?",)) if "restore" in how else BEGINNING
    reuse = how.get("reuse", False)
    return Assignment(generation, 1, 0, LAYERS, task, step, reuse, decision(decided) if decided else None, mark, owed)


def turn(generation: int, task: int = 0, kind: str = "", step: int = 0, decided: int = 0, **how: Any) -> Turn:
    what = (task, kind, step) if task else None
    return Turn(generation, decision(decided) if decided else None, what, how.get("save", False), how.get("version", 0))


def decision(step: int) -> Decided:
    return Decided(step, True, 1e-3, 1.0, 2.0, 1.0, 1, 0, 0)


def keep(*complete: int, begun: tuple[int, ...] = (), newest: int | None = None) -> Keep:
    """Snapshots by their steps."""
    pending = frozenset((1, step) for step in begun)
    parts = () if newest is None else (Part(1, newest, 0, "?"),)
    return Keep(frozenset((1, step) for step in complete) | pending, pending, parts)


def prepare(step: int) -> ev.PrepareStage:
    return ev.PrepareStage("p", Part(1, step, 0, "?"), LAYERS, 0)


def done(generation: int, task: int) -> Answer:
    return "done", generation, task


def register(applied: int | None = None, prepared: int = 0, parts: tuple[int, ...] = (), generation: int = 0) -> Answer:
    holds = None if applied is None else (1, 0, LAYERS, applied, prepared, generation)
    return "register", holds, tuple((1, step, 0) for step in parts)


def part(step: int) -> Answer:
    return "part", 1, step, 0


NEW, MOVED = NewBasis(1, 1, "u1"), ("subspace", 1, 2, True)
BUILT = [(assign(1, 1), done(1, 1)), (turn(1, 2, "link"), done(1, 2))]
ONE_STEP = [*BUILT, (turn(1, 3, "step", 1), done(1, 3))]
TWO_STEPS = [*ONE_STEP, (turn(1, 4, "step", 2, decided=1), done(1, 4))]
SAVED = [*TWO_STEPS, (turn(1, 5, "sync", 2, decided=2, save=True), done(1, 5), part(2), MOVED)]

# A word, and what is answered to it, in whichever order where it is more than one
SCRIPTS: dict[str, list[tuple[Any, ...]]] = {
    "nothing to do": [(SPARE,), (keep(0),)],
    "a whole run": [
        *TWO_STEPS,
        (turn(1, 5, "evaluation", 2, decided=2), done(1, 5), MOVED),
        (NEW, ("basis taken", 1, 1)),
        (turn(1, 6, "sync", 2), done(1, 6)),
        (turn(1, 7, "step", 3), done(1, 7)),
        (turn(1, 8, "step", 4, decided=3, version=1), done(1, 8)),
        (turn(1, 9, "finish", 4, decided=4), done(1, 9), ("subspace", 1, 4, True)),
    ],
    "a turn without a task": [*ONE_STEP, (turn(1, decided=1),), (turn(1, 4, "sync", 1), done(1, 4))],
    "a word that comes twice": [
        *BUILT,
        (turn(1, 3, "sync"), done(1, 3)),
        (Again(),),
        (turn(1, 4, "sync"), done(1, 4)),
    ],
    "a word that is lost": [
        *ONE_STEP,
        (Lost(turn(1, 4, "step", 2, decided=1)), register(0, prepared=1, generation=1), done(1, 3)),
    ],
    "a stream that breaks": [*TWO_STEPS, (HangUp(), register(1, prepared=1, generation=1), done(1, 4))],
    "back in its generation, with a turn missed": [
        *ONE_STEP,
        (Lost(turn(1, 4, "step", 2, decided=1)), register(0, prepared=1, generation=1), done(1, 3)),
        (turn(1, 4, "step", 2, decided=1), done(1, 4)),
        (turn(1, 4, "step", 2, decided=1),),
    ],
    "back in its generation, with nothing missed": [
        *TWO_STEPS,
        (HangUp(), register(1, prepared=1, generation=1), done(1, 4)),
        (turn(1, 4, "step", 2, decided=1),),
        (turn(1, 5, "sync", 2, decided=2), done(1, 5), MOVED),
    ],
    "a lost assignment": [(SPARE,), (Lost(assign(1, 1)), register()), (assign(1, 1), done(1, 1))],
    "turns of another generation": [
        *BUILT,
        (turn(2, 3, "sync", decided=1, save=True),),
        (turn(0, 4, "sync"),),
        (turn(1, 5, "sync"), done(1, 5)),
    ],
    "a turn for nobody": [(turn(1, 1, "sync"),), (NEW,), (SPARE,), (turn(1, 2, "sync"),), (NEW,)],
    "reused as it is": [*BUILT, (assign(2, 3, reuse=True), done(2, 3)), (turn(2, 4, "step", 1), done(2, 4))],
    "reused, and the decision comes with the assignment": [
        *ONE_STEP,
        (assign(2, 4, step=1, decided=1, reuse=True), done(2, 4)),
        (HangUp(), register(1, generation=2), done(2, 4)),
    ],
    "kept, and the decision was known": [
        *TWO_STEPS,
        (assign(2, 5, step=1, decided=1, reuse=True), done(2, 5)),
        (HangUp(), register(1, generation=2), done(2, 5)),
        (assign(3, 6, step=1, decided=1, reuse=True), done(3, 6)),
        (turn(3, 7, "step", 2), done(3, 7)),
        (turn(3, 8, "finish", 2, decided=2), done(3, 8), ("subspace", 3, 2, True)),
    ],
    "what was prepared in an old generation is not decided": [
        *ONE_STEP,
        (assign(2, 4, reuse=True), done(2, 4)),
        (HangUp(), register(0, generation=2), done(2, 4)),
    ],
    "what becomes of the subspace is owed": [
        *TWO_STEPS,
        (turn(1, 5, "sync", 2, decided=2), done(1, 5), MOVED),
        (assign(2, 6, step=2, decided=2, owed=2, reuse=True), done(2, 6), ("subspace", 2, 2, True)),
        (assign(3, 7, step=2, decided=2, owed=0, reuse=True), done(3, 7)),
    ],
    "what is owed is decided with the assignment": [
        *TWO_STEPS,
        (assign(2, 5, step=2, decided=2, owed=2, reuse=True), done(2, 5), ("subspace", 2, 2, True)),
    ],
    "hold on": [
        *ONE_STEP,
        (HOLD_ON,),
        (turn(1, 4, "sync"),),
        (NEW,),
        (HangUp(), register(0, prepared=1)),
        (assign(2, 5, step=1, decided=1, reuse=True), done(2, 5)),
    ],
    "a spare has nothing": [*ONE_STEP, (SPARE,), (HangUp(), register())],
    "a new basis is not kept for another stage": [
        *BUILT,
        (NEW, ("basis taken", 1, 1)),
        (assign(2, 3), done(2, 3)),
        (turn(2, 4, "step", 1), done(2, 4)),
    ],
    "a part is uploaded, and again where it is asked for again": [
        *SAVED,
        (turn(1, 6, "sync", 2, save=True), done(1, 6), part(2)),
        (turn(1, 7, "sync", 2), done(1, 7)),
        (keep(0, begun=(2,)), part(2)),
        (keep(0, 2),),
        (HangUp(), register(2, parts=(2,), generation=1), done(1, 7)),
        (keep(0),),
        (HangUp(), register(2, generation=1), done(1, 7)),
    ],
    "restored from its own disk": [
        *SAVED,
        (keep(0, 2),),
        (assign(2, 6, step=2, restore=2), done(2, 6)),
        (HangUp(), register(2, parts=(2,), generation=2), done(2, 6)),
        (assign(3, 7, step=2, reuse=True), done(3, 7)),
        (turn(3, 8, "step", 3), done(3, 8)),
    ],
    "restored from the coordinator": [
        *SAVED,
        (keep(0),),
        (HangUp(), register(2, generation=1), done(1, 5)),
        (assign(2, 6, step=2, restore=2), done(2, 6)),
        (HangUp(), register(2, parts=(2,), generation=2), done(2, 6)),
    ],
    "a snapshot that nobody has": [*BUILT, (assign(2, 3, step=4, restore=4), ("snapshot lost", 2, 1, 4))],
    "a spare fetches ahead": [
        *SAVED,
        (keep(0),),
        (keep(0, 2, newest=2),),
        (SPARE, ("fetched", 1, 2, 0)),
        (keep(0, 2, newest=2),),
        (HangUp(), register(parts=(2,))),
    ],
    "who was not told that it is a spare fetches nothing": [
        (keep(0, 4, newest=4),),
        *SAVED,
        (keep(0),),
        (HOLD_ON,),
        (keep(0, 2, newest=2),),
        (HangUp(), register(2)),
        (SPARE, ("fetched", 1, 2, 0)),
    ],
    "a stage that is built ahead, and then assigned": [
        *SAVED,
        (keep(0),),
        (SPARE,),
        (prepare(2), ("fetched", 1, 2, 0), ("ready", 1, 2, 0)),
        (assign(2, 6, step=2, restore=2), done(2, 6)),
        (turn(2, 7, "step", 3), done(2, 7)),
        (HangUp(), register(2, prepared=2, parts=(2,), generation=2), done(2, 7)),
    ],
    "a stage that is built ahead, and not needed": [
        *SAVED,
        (keep(0, 2),),
        (SPARE,),
        (prepare(2), ("ready", 1, 2, 0)),
        (SPARE,),
        (HangUp(), register(parts=(2,))),
        (SPARE,),
        (prepare(2), ("ready", 1, 2, 0)),
        (HangUp(), register(parts=(2,))),
        (assign(2, 6), done(2, 6)),
        (turn(2, 7, "step", 1), done(2, 7)),
    ],
    "a stage that is told to be built ahead twice": [
        *SAVED,
        (keep(0, 2),),
        (SPARE,),
        (prepare(2), ("ready", 1, 2, 0)),
        (prepare(2), ("ready", 1, 2, 0)),
        (assign(2, 6, step=2, restore=2), done(2, 6)),
    ],
    "a stage that is built ahead from a part that is damaged": [
        *SAVED,
        (keep(0, 2),),
        (SPARE,),
        (Rot(),),
        (prepare(2), ("lacking", 1, 2, 0), ("fetched", 1, 2, 0), ("ready", 1, 2, 0)),
        (prepare(2), ("ready", 1, 2, 0)),
    ],
    "a stage that is restored from a part that is damaged": [
        *SAVED,
        (keep(0, 2),),
        (Rot(),),
        (assign(2, 6, step=2, restore=2), ("lacking", 1, 2, 0), done(2, 6)),
    ],
    "nothing to build ahead from": [(SPARE,), (prepare(4), ("snapshot lost", 0, 1, 4)), (SPARE,)],
    "who builds a stage ahead fetches nothing beside it": [
        *SAVED,
        (keep(0),),
        (SPARE,),
        (prepare(2), ("fetched", 1, 2, 0), ("ready", 1, 2, 0)),
        (keep(0, newest=2),),
        (HangUp(), register()),
    ],
    "who is told to build ahead lets go of what it has": [
        *SAVED,
        (prepare(2), ("ready", 1, 2, 0)),
        (turn(1, 7, "step", 3, decided=2),),
        (HangUp(), register(parts=(2,))),
    ],
    "a disk that is full": [
        *TWO_STEPS,
        (DiskFull(True),),
        (turn(1, 5, "sync", 2, decided=2, save=True), done(1, 5), ("part failed", 1, 2, 0), MOVED),
        (keep(0, begun=(2,)), ("part failed", 1, 2, 0)),
        (DiskFull(False),),
        (turn(1, 6, "sync", 2, save=True), done(1, 6), part(2)),
        (turn(1, 7, "sync", 2), done(1, 7)),
        (keep(0, begun=(2,)), part(2)),
    ],
    "a step that was under way is void": [
        *BUILT,
        (assign(2, 3, reuse=True), done(2, 3)),
        (turn(1, 4, "step", 1),),
        (turn(2, 5, "sync"), done(2, 5)),
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_simulated_peer_answers_as_the_script_has_it(name):
    peer = SimulatedPeer(SPEC)
    assert peer.said.pop() == register()
    for word, *answers in [*SCRIPTS[name], (GOOD_BYE, ("ended",))]:
        peer.tell(word)
        assert sorted(peer.said + peer.handed) == sorted(answers), word
        peer.said, peer.handed = [], []


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_real_session_answers_as_the_script_has_it(tmp_path, name):
    async def play() -> None:
        peer = RealPeer(SPEC, tmp_path)
        async with peer.joined() as session:
            assert peer.said.pop() == register()
            for word, *answers in SCRIPTS[name]:
                peer.tell(word)
                await until(lambda n=len(answers): session.done() or len(peer.said + peer.handed) >= n, f"{word}", 30)
                assert not session.done(), session.result()
                found, peer.said, peer.handed = peer.said + peer.handed, [], []
                assert sorted(found) == sorted(answers), word
            peer.tell(GOOD_BYE)
            assert await asyncio.wait_for(session, 30) == 0
            assert peer.said + peer.handed == [], "after the last word of the script"

    asyncio.run(play())
