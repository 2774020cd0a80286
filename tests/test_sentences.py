"""The one place that checks how the coordinator's words read. Everywhere else kinds and fields are checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from sentences_of_audits import AUDITS, CONTRADICTED, DIFFER, FALSE, FIX, FOUND, LIE, LIED
from sentences_of_copies import OF_COPIES, STORE_WAITS
from sentences_of_refusals import AGAIN, REFUSALS
from sentences_of_reseating import RESEATING, RESEATINGS
from test_sentences_store import STORE
from wording import check_kinds, check_row, check_wording, facts_of, members

from protomodels_cli.coordinator import audit_notices as audit
from protomodels_cli.coordinator import audit_reasons, no_placement, silences
from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import reasons as r
from protomodels_cli.coordinator import rebuild_notices as rebuilding
from protomodels_cli.coordinator import refusals as no
from protomodels_cli.coordinator import reseat_notices as reseat
from protomodels_cli.coordinator.refusal_sentences import refusal
from protomodels_cli.coordinator.sentences import (
    dismissal,
    loss,
    pause,
    pause_for_peers,
    rollback,
    sentence,
    spare,
    waiting,
)
from protomodels_cli.coordinator.snapshots import failures
from protomodels_cli.facts import Fact
from protomodels_cli.wire import troubles as t

DESK, ATTIC = r.Holder(1, "p2", "desk"), r.Holder(2, "p3", "attic")
GIB, MIB = 1 << 30, 1 << 20
HELD = no_placement.InFlight(600 * MIB, more_microbatches=True, recompute=True)
WORK = r.StagesWorking("step", 5, (DESK,), 612.4)
LR = 0.001
FULL = failures.NotWritten("No space left on device")
LATE = r.SpoiltSnapshots(2, 2, failures.Overdue(9.0))
NARROW = r.SpoiltSnapshots(2, 3, failures.WrongTensor("weights/x", "F32 [1]", "F32 [32]"))

NOTICES: list[tuple[n.Notice, str]] = [
    (n.PeerJoined("p2", "desk", "cuda:0"), "desk (p2) joined with cuda:0"),
    (n.PeerJoined("p2", "desk", "cuda:0", "anna"), "desk (p2, with the token for anna) joined with cuda:0"),
    (n.PeerReturned("p2", "desk", "cuda:0"), "desk (p2) reconnected with cuda:0"),
    (n.PeerLost("p2", "desk", 2, r.NoHeartbeat(5.0)), "lost desk (stage 2): no heartbeat for 5 s"),
    (n.PeerLost("p2", "desk", None, r.ConnectionClosed()), "lost desk (spare): the connection closed"),
    (
        n.OutsizedMessages("p2", "desk", 2, 3, 41, 1e6, 10),
        "desk (stage 2) sent numbers 1,000,000 times as large as in the last steps, as stage 3 reports of step 41 "
        "(report 10 on desk); nobody is dismissed for it",
    ),
    (
        n.TurnedAway("203.0.113.9", "parts", 100, "p2"),
        "203.0.113.9 asked 100 times for parts of snapshots that it was not told to use, the last time as peer p2; it "
        "got none of them",
    ),
    (
        n.TurnedAway("203.0.113.9", "parts", 10),
        "203.0.113.9 asked 10 times for parts of snapshots that it was not told to use; it got none of them",
    ),
    (
        n.TurnedAway("203.0.113.9", "too_many_calls", 1000),
        "203.0.113.9 made more calls at a time than are served: 1,000 calls turned away so far",
    ),
    (
        n.HolderAway("p2", "desk", 2, 42, 504.0),
        "waiting for desk (stage 2) to reconnect: a rollback would redo 42 steps (8 min 24 s)",
    ),
    (n.NoSpareLeft(), "no spare left: the next loss stops the run until one more peer joins"),
    (n.PeerLeft("p2", "desk", 2), "desk (stage 2) left the run as requested"),
    (n.PeerRests("p2", "desk", 2, 0.0), "desk (stage 2) rests until it is woken"),
    (n.PeerWoke("p2", "desk"), "desk is awake again"),
    (
        n.NotifyFailed("https://ntfy.sh/…", "answered 429 Too Many Requests"),
        "no message reached https://ntfy.sh/… (answered 429 Too Many Requests): the run goes on, and the next message "
        "is tried again",
    ),
    (
        n.PeerDismissed("p2", "desk", 2, r.HashMismatch("T_fixed")),
        "dismissed desk (stage 2): computed a different T_fixed (hash mismatch)",
    ),
    (
        n.StagesAssigned(3, (2, 3), (r.Holder(0, "p1", "loft"), DESK)),
        "generation 3: 2 stages of 2+3 layers, held by loft, desk",
    ),
    (n.StagesAssigned(1, (4,), (r.Holder(0, "p1", "loft"),)), "generation 1: 1 stage of 4 layers, held by loft"),
    (n.StagesLinked(3), "generation 3: all stages are linked"),
    (
        n.StagePrepared("p4", "attic", 2, 40),
        "attic has built stage 2 from the snapshot at step 40, should the holder not come back",
    ),
    (
        n.PartNotThere("p4", "attic", 2, 40),
        "attic does not have stage 2's part of the snapshot at step 40, though it said so; it has to fetch it",
    ),
    (
        n.Relinking("p2", "desk", 1, r.PeerReport(t.LinkBroken(2))),
        "trouble at desk (stage 1): the link to stage 2 broke; relinking all stages",
    ),
    (
        n.StageGivenUp("p2", "desk", 1, r.PeerReport(t.LinkBroken(2))),
        "desk (stage 1) becomes a spare and is asked last for an hour: the link to stage 2 broke",
    ),
    (
        n.Stalled(WORK),
        "stalled, still waiting for stage 1 (desk) to finish step 5 (10 min so far); relinking all stages",
    ),
    (
        n.RolledBack(r.StagesLost((0,), 5), 3, 2, 2),
        "rolled back to the snapshot at step 3, 2 steps to redo: stage 0 was lost after step 5",
    ),
    (
        n.RolledBack(r.StagesLost((0, 1), 1), 0, 1, 2),
        "rolled back to the beginning, 1 step to redo: stages 0, 1 were lost after step 1",
    ),
    (n.SnapshotComplete(3), "saved the snapshot at step 3"),
    (
        n.CheckpointCut("start", "ab12", (2, 3), tied=False),
        "made the first snapshot, 2 parts, from start (sha256 ab12)",
    ),
    (
        n.CheckpointCut("start", "ab12", (3,), tied=True),
        "made the first snapshot, 1 part, from start (sha256 ab12); the tied head starts as a copy of the embedding",
    ),
    (n.SnapshotSkipped(6, 3), "skipped the snapshot at step 6: the one from step 3 is still uploading"),
    (
        n.SnapshotWithoutRoom(6, 3 * GIB),
        "skipped the snapshot at step 6: the coordinator's disk lacks 3 GiB; retrying after every step",
    ),
    (
        n.SnapshotFailed(6, 2, "p2", "desk", FULL),
        "could not save stage 2's part of the snapshot at step 6: desk: No space left on device",
    ),
    (
        n.SnapshotFailed(6, 2, "p2", "", failures.TooLarge(3 << 20, 2 << 20)),
        "could not save stage 2's part of the snapshot at step 6: p2: the part has 3 MiB, and may have 2 MiB at most",
    ),
    (
        n.SnapshotFailed(6, 2, None, "", FULL),
        "could not save stage 2's part of the snapshot at step 6: the coordinator: No space left on device",
    ),
    (
        n.SnapshotUnusable(6, "hash mismatch"),
        "the snapshot at step 6 is unusable: hash mismatch; what is left of it is set aside",
    ),
    *OF_COPIES,
    (n.Paused(r.ByOwner(), "tiny"), "paused by the owner; continue with `pmtrain resume tiny`"),
    (n.Resumed(), "resumed by the owner"),
    (n.Continuing(5, 9, 3), "continuing after step 5 of 9 (snapshot at step 3)"),
    (n.Continuing(2, 9, 0), "continuing after step 2 of 9 (no snapshot yet)"),
    (n.RunDone(9), "the run is done after 9 steps"),
    (
        n.RunStopped(5, "runs/tiny"),
        "stopped by the owner, saved up to step 5; continue with `pmtrain coordinator --resume --dir runs/tiny`",
    ),
    (
        n.RunStopped(0, "runs/tiny"),
        "stopped by the owner, nothing was saved yet; continue with `pmtrain coordinator --resume --dir runs/tiny`",
    ),
    (
        n.Interrupted(5, "runs/home"),
        "interrupted after step 5; the peers wait, continue with `pmtrain coordinator --resume --dir runs/home`",
    ),
    (
        n.DiskFailed("runs/home", "No space left on device"),
        "cannot write to runs/home: No space left on device; mend that and start the coordinator again",
    ),
    (n.Ended("run_dir_failed", "cannot write to runs/home"), "cannot write to runs/home"),
]

NOTICES += [
    *STORE,
    *RESEATINGS,
    *AUDITS,
    (rebuilding.JournalRefused("the journal is damaged"), "the journal is damaged"),
    (
        rebuilding.SnapshotSetAside("0001-00000006", "hash mismatch"),
        "set aside the snapshot 0001-00000006, which cannot be used: hash mismatch",
    ),
    (
        rebuilding.JournalRebuilt(6, 2, "runs/home/set-aside-3"),
        "made a new journal from the snapshot at step 6, 2 steps to redo; a paused run continues; the old journal is "
        "in runs/home/set-aside-3",
    ),
    (
        rebuilding.JournalRebuilt(0, 0, "aside"),
        "made a new journal from the beginning, without a complete snapshot, nothing to redo; a paused run continues; "
        "the old journal is in aside",
    ),
]

LOSSES: list[tuple[r.Loss, str]] = [
    (r.NoHeartbeat(5.0), "no heartbeat for 5 s"),
    (r.ConnectionClosed(), "the connection closed"),
    (r.NotRenewed(), "the certificate has expired, and was not renewed"),
    (r.AskedToLeave(), "left the run"),
    (r.AskedToRest(0.0), "rests"),
    (r.HashMismatch("U"), "computed a different U (hash mismatch)"),
    (r.DamagedBasis(3), "received basis 3 damaged (hash mismatch)"),
    (r.FalseClaim(2), "said that it has stage 2 in memory, which it was never given"),
    (r.TooSlow(2, "build", 120.0), "did not build stage 2 within 2 min"),
    (r.TooSlow(2, "reuse", 90.0), "did not continue with stage 2 from memory within 1 min 30 s"),
    (r.TooSlow(2, "restore", 90.0), "did not restore stage 2 from a snapshot within 1 min 30 s"),
    (r.PartNotProved(2, 40), "could not prove that it has stage 2's part of the snapshot at step 40"),
    (r.TooSlow(2, "link", 45.0), "did not link stage 2 within 45 s"),
    (r.CameAndWent(2, 9), "came back 9 times before a step was done"),
    (r.TooSlow(2, "task", 90.0), "did not report on stage 2 within 1 min 30 s"),
    (
        r.UnsoundNumbers(2, 5),
        "had a non-finite loss or gradient of stage 2 in 5 steps in a row, as no other stage had",
    ),
    (r.TooSlow(2, "step", 45.0), "did not finish the first step with stage 2 within 45 s"),
    (r.PartUnreadable(6), "could not read a part of the snapshot at step 6"),
    (LATE, "spoilt 2 snapshots in a row: the part was not uploaded within 9 s"),
    (NARROW, "spoilt 3 snapshots in a row: the part's weights/x is F32 [1] instead of F32 [32]"),
    (r.TooManyMessages(20.0), "sent more than 20 messages a second unasked"),
    (r.NotReading(1234), "left 1,234 messages unread"),
    (r.Kicked(), "kicked by the run's owner"),
    (r.PeerReport(t.Failed("KeyError: 7")), "failed: KeyError: 7"),
    (r.InvalidMessage("a squared norm below zero"), "sent an invalid message: a squared norm below zero"),
    (
        r.UnprocessableMessage("Done"),
        "sent a message that the coordinator could not process (Done); see coordinator.log",
    ),
    (r.InvalidBasis("not orthonormal"), "sent an invalid basis: not orthonormal"),
    *FOUND,
]

DISMISSALS: list[tuple[r.Dismissal, str, str]] = [
    (r.RunFinished(), "the run is done", ""),
    (r.RunStopped(5), "the run was stopped by the owner, saved up to step 5", ""),
    (r.RunStopped(0), "the run was stopped by the owner, nothing was saved yet", ""),
    (r.AskedToLeave(), "left the run", ""),
    (
        r.HashMismatch("U"),
        "dismissed: computed a different U (hash mismatch)",
        "install the coordinator's version of pmtrain; if the versions agree, test this machine's memory",
    ),
    (
        r.TooSlow(2, "build", 120.0),
        "dismissed: did not build stage 2 within 2 min",
        "use a faster machine, or ask the run's owner to raise limits.build_seconds",
    ),
    (r.DamagedBasis(3), "dismissed: received basis 3 damaged (hash mismatch)", AGAIN),
    (r.FalseClaim(2), "dismissed: said that it has stage 2 in memory, which it was never given", AGAIN),
    (
        r.SpoiltSnapshots(2, 2, failures.NoTensors("the header is not JSON")),
        "dismissed: spoilt 2 snapshots in a row: the part is not a safetensors file: the header is not JSON",
        "check this machine's disk, upload speed and version of pmtrain, then join again",
    ),
    (r.TooManyMessages(20.0), "dismissed: sent more than 20 messages a second unasked", AGAIN),
    (r.NotReading(2000), "dismissed: left 2,000 messages unread", AGAIN),
    (r.Kicked(), "dismissed: kicked by the run's owner", "ask the run's owner"),
    (r.PartNotProved(2, 6), "dismissed: could not prove that it has stage 2's part of the snapshot at step 6", AGAIN),
    (r.CameAndWent(2, 9), "dismissed: came back 9 times before a step was done", AGAIN),
    (
        r.UnsoundNumbers(2, 5),
        "dismissed: had a non-finite loss or gradient of stage 2 in 5 steps in a row, as no other stage had",
        AGAIN,
    ),
    (r.PartUnreadable(6), "dismissed: could not read a part of the snapshot at step 6", AGAIN),
    (r.PeerReport(t.Failed("KeyError: 7")), "dismissed: failed: KeyError: 7", AGAIN),
    (r.InvalidMessage("x"), "dismissed: sent an invalid message: x", AGAIN),
    (
        r.UnprocessableMessage("Done"),
        "dismissed: sent a message that the coordinator could not process (Done); see coordinator.log",
        AGAIN,
    ),
    (r.InvalidBasis("x"), "dismissed: sent an invalid basis: x", AGAIN),
    (LIE, f"dismissed: {LIED}", FIX),
    (FALSE, f"dismissed: {CONTRADICTED}", FIX),
    (DIFFER, "dismissed: stages 1 and 2 report different messages of step 41", AGAIN),
]

PAUSES: list[tuple[r.Pause, str]] = [
    (r.ByOwner(), "paused by the owner; continue with `pmtrain resume tiny`"),
    (
        r.NonFinite(3, 9, LR),
        "paused: 3 steps in a row, up to step 9, had a non-finite loss or gradient; lower optimizer.lr (0.001) or "
        "lengthen the warm-up in a new run, or continue with `pmtrain resume tiny`",
    ),
]

FOR_PEERS: list[tuple[r.Pause, str]] = [
    (r.ByOwner(), "tiny is paused by the owner after this step"),
    (
        r.NonFinite(3, 9, LR),
        "tiny is paused until the owner resumes the run: 3 steps in a row, up to step 9, had a non-finite loss or "
        "gradient",
    ),
]

ROLLBACKS: list[tuple[r.Rollback, str]] = [
    (r.StagesLost((0,), 5), "stage 0 was lost after step 5"),
    (r.StageDiverged(DESK, "U", 4), "stage 1 (desk) used a different U (hash mismatch), found after step 4"),
    (r.SnapshotDamaged(4), "the snapshot at step 4 is damaged"),
    (r.NonFinite(3, 9, LR), "3 steps in a row, up to step 9, had a non-finite loss or gradient"),
]

SPARES: list[tuple[r.Spare, str]] = [
    (r.Resting(), "resting: this peer has no stage until it wakes"),
    (r.AllStagesHeld(4), "spare: all 4 stages have a holder"),
    (r.AllStagesHeld(1), "spare: the only stage has a holder"),
    (r.StageTried(2, "attic"), "waiting for the first step with attic in stage 2"),
    (no_placement.TooFewPeers(1, 2), "waiting for peers: 1 of 2 has joined"),
]

WAITS: list[tuple[r.Waiting, str]] = [
    (r.NoPeers(), "peers to join"),
    (no_placement.TooFewPeers(1, 2), "peers: 1 of 2 has joined"),
    (
        no_placement.TooFewPeers(0, 2, at_least=True, unusable=1),
        "peers: 0 of at least 2 have joined (1 more peer reported an unusable speed)",
    ),
    (
        no_placement.StageTooLarge(2, no_placement.Layers(4, 6, head=True), 3 * GIB, 2 * GIB),
        "a larger peer: no joined peer has the 3 GiB that stage 2 (layers 4–5 and the head) needs, the largest has "
        "2 GiB",
    ),
    (
        no_placement.StageTooLarge("first", no_placement.Layers(0, 1, head=False), GIB + 1, GIB, HELD),
        "a larger peer: no joined peer has the 1,073,741,825 bytes that the first stage (the embedding and layer 0 at "
        "the least) needs, the largest has 1,073,741,824 (600 MiB are for microbatches: raise "
        "batch.microbatches or set compute.recompute to auto)",
    ),
    (
        no_placement.ModelTooLarge(3 * GIB, 2 * GIB, more_peers_help=True, unusable=2),
        "a larger peer: no joined peer has the 3 GiB that the whole model in one stage needs, the largest has 2 GiB; "
        "more peers could share the model (2 more peers reported an unusable speed)",
    ),
    (
        no_placement.TooFewLargePeers(2, 3 * GIB, 1, 2 * GIB, no_placement.InFlight(2 * GIB, False, True)),
        "larger peers: 2 of the stages need 3 GiB or more each, and only 1 of the joined peers has that much (2 GiB "
        "are for microbatches: set compute.recompute to auto)",
    ),
    (
        no_placement.EndsTooLarge(GIB, 2 * GIB),
        "larger peers: the first stage needs at least 1 GiB and the last 2 GiB, and no two of the joined peers have "
        "that",
    ),
    (
        no_placement.TooFewLayersFit(3, 5, 8, 3, GIB, no_placement.InFlight(MIB, True, False)),
        "more or larger peers: the 3 joined peers have memory for 5 of the 8 layers; cut into 3, the first stage takes "
        "1 GiB with one layer (1 MiB are for microbatches: raise batch.microbatches)",
    ),
    (
        no_placement.TooFewLayersFit(3, 6, 8, 3, GIB, first_layers=2),
        "more or larger peers: the 3 joined peers have memory for 6 of the 8 layers; cut into 3, the first stage takes "
        "1 GiB with one segment of 2 layers",
    ),
    (
        no_placement.HostMemoryTooSmall(381 * GIB),
        "peers with more host memory: a stage needs up to 381 GiB of it for codecs, besides the memory of the device, "
        "and too few of the joined peers have that",
    ),
    (r.StagesWithoutPeer((r.StageNeed(0, 12 * MIB),)), "one more peer: nobody holds stage 0 (12 MiB)"),
    (
        r.StagesWithoutPeer((r.StageNeed(0, 12 * MIB, 2 * GIB),)),
        "one more peer: nobody holds stage 0 (12 MiB + 2 GiB of host memory)",
    ),
    (
        r.StagesWithoutPeer((r.StageNeed(0, 12 * MIB), r.StageNeed(2, 1023 * MIB))),
        "2 more peers: nobody holds stage 0 (12 MiB) and stage 2 (1,023 MiB)",
    ),
    (
        r.StagesWithoutPeer((r.StageNeed(0, 12 * MIB),), 1),
        "one more peer with more memory: nobody holds stage 0 (12 MiB), and the free peer has too little for it",
    ),
    (
        r.StagesWithoutPeer((r.StageNeed(0, 12 * MIB),), 2),
        "one more peer with more memory: nobody holds stage 0 (12 MiB), and the 2 free peers have too little for it",
    ),
    (r.HoldersDisconnected((0,)), "the holder of stage 0 to reconnect"),
    (r.HoldersDisconnected((0, 2)), "the holders of stages 0, 2 to reconnect"),
    (r.CheckpointUncut("start"), "the first snapshot to be cut from start"),
    (r.CoordinatorRestarted(), "the peers from before the restart to reconnect"),
    (WORK, "stage 1 (desk) to finish step 5 (10 min so far)"),
    (r.StagesWorking("build", 0, (DESK, ATTIC), 0.2), "stages 1 (desk), 2 (attic) to build (0 s so far)"),
    (r.StagesWorking("build", 5, (DESK,), 3.0), "stage 1 (desk) to restore step 5 (3 s so far)"),
    (r.StagesWorking("link", 5, (r.Holder(1, "p2"),), 3.0), "stage 1 to link (3 s so far)"),
    (r.StagesWorking("sync", 5, (DESK,), 3.0), "stage 1 (desk) to report the hashes after step 5 (3 s so far)"),
    (r.StagesWorking("evaluation", 5, (DESK,), 3.0), "stage 1 (desk) to evaluate step 5 (3 s so far)"),
    (r.StagesWorking("finish", 5, (DESK,), 3.0), "stage 1 (desk) to hash the final weights (3 s so far)"),
    *STORE_WAITS,
    (r.SnapshotIncomplete(4), "the snapshot at step 4 to be uploaded"),
    (r.SnapshotFailing(4, FULL), "the snapshot at step 4 to be retried: No space left on device"),
    (
        r.SnapshotFailing(4, failures.NoRoom(3 * MIB)),
        "the snapshot at step 4 to be retried: the coordinator's disk lacks 3 MiB",
    ),
    (r.OwnersResume(), "the owner to resume the run"),
    (r.SubspaceReport(2), "the last stage to report on the subspace after step 2"),
    (r.BasisNotTaken(3, (DESK,)), "stage 1 (desk) to take basis 3"),
    RESEATING,
    (r.Coordinator(), "the coordinator"),
    (r.CoordinatorStopped(), "the coordinator to be started again"),
]


def _joined(texts: Iterable[str]) -> str:
    """A sentence and what to do, where there is something to do."""
    return " / ".join(filter(None, texts))


TABLE: list[tuple[Fact, str, str]] = [
    *((fact, sentence(fact), text) for fact, text in NOTICES),
    *((fact, loss(fact), text) for fact, text in LOSSES),
    *((fact, _joined(dismissal(fact)), _joined(text)) for fact, *text in DISMISSALS),
    *((fact, _joined(refusal(fact)), _joined(text)) for fact, *text in REFUSALS),
    *((fact, pause(fact, "tiny"), text) for fact, text in PAUSES),
    *((fact, pause_for_peers(fact, "tiny"), text) for fact, text in FOR_PEERS),
    *((fact, rollback(fact), text) for fact, text in ROLLBACKS),
    *((fact, spare(fact), text) for fact, text in SPARES),
    *((fact, waiting(fact), text) for fact, text in WAITS),
]


@pytest.mark.parametrize(("fact", "found", "text"), TABLE, ids=lambda x: x.kind if isinstance(x, Fact) else "")
def test_what_is_said(fact: Fact, found: str, text: str):
    assert found == text


@pytest.mark.parametrize(
    ("union", "rows"),
    [
        (n.Notice, NOTICES),
        (r.Loss, LOSSES),
        (r.Dismissal, DISMISSALS),
        (no.Refusal, REFUSALS),
        (r.Pause, PAUSES),
        (r.Rollback, ROLLBACKS),
        (r.Waiting, WAITS),
    ],
    ids=["notices", "losses", "dismissals", "refusals", "pauses", "rollbacks", "waits"],
)
def test_every_kind_has_a_row_in_the_table(union: Any, rows: list[tuple[Any, ...]]):
    assert members(union) == {type(row[0]) for row in rows}


def test_every_fact_of_these_modules_is_said_somewhere():
    assert set(facts_of(n, rebuilding, reseat, audit, r, silences, audit_reasons, no, no_placement)) == {
        type(row[0]) for row in TABLE
    }


def test_kinds_are_snake_case_and_tell_facts_apart():
    check_kinds(facts_of(r, silences, audit_reasons, no))
    check_kinds(facts_of(n, rebuilding, reseat, audit))


@pytest.mark.parametrize("text", sorted({text for _, _, text in TABLE}))
def test_a_sentence_stands_on_its_own(text: str):
    check_wording(text)


@pytest.mark.parametrize("notice", [notice for notice, _ in NOTICES], ids=lambda notice: notice.kind)
def test_an_event_is_a_row_of_json_with_its_kind_first(notice: n.Notice):
    check_row(notice)
