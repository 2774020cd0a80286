"""How the coordinator's notices and reasons read: the one place where they become English. Nothing reads them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from protomodels_cli.coordinator import audit_notices as audit
from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import path_reasons as paths
from protomodels_cli.coordinator import reasons as r
from protomodels_cli.coordinator import rebuild_notices as rebuilding
from protomodels_cli.coordinator import reseat_notices as reseat
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts, MessagesDiffer
from protomodels_cli.coordinator.audit_sentences import about_audits, contradicted, differ, lied
from protomodels_cli.coordinator.placement_sentences import no_placement
from protomodels_cli.coordinator.reseat_sentences import about_reseating, faster
from protomodels_cli.coordinator.snapshots import failures as f
from protomodels_cli.coordinator.store_sentences import about_copies, about_rebuilding, about_store, part_of
from protomodels_cli.observe import troubles
from protomodels_cli.observe.punches import not_punched
from protomodels_cli.quantities import duration, figures, plural, size, until_when


def _mark(step: int) -> str:
    return f"the snapshot at step {step}" if step else "the beginning"


def sentence(notice: n.Notice) -> str:
    """What the owner reads."""
    match notice:
        case n.PeerJoined(peer, name, device, person):
            return f"{name} ({peer}{_of(person)}) joined with {device}"
        case n.PeerReturned(peer, name, device, person):
            return f"{name} ({peer}{_of(person)}) reconnected with {device}"
        case n.PeerLost(_, name, stage, reason):
            return f"lost {_peer(name, stage)}: {loss(reason)}"
        case n.OutsizedMessages(_, name, stage, by, step, times, many):
            return (
                f"{name} (stage {stage}) sent numbers {figures(times)} times as large as in the last steps, as stage "
                f"{by} reports of step {step} (report {many} on {name}); nobody is dismissed for it"
            )
        case n.TurnedAway(network, "parts", times, peer):
            last = f", the last time as peer {peer}" if peer else ""
            return (
                f"{network} asked {plural(times, 'time')} for parts of snapshots that it was not told to use{last}; it "
                "got none of them"
            )
        case n.TurnedAway(network, _, times):
            return f"{network} made more calls at a time than are served: {plural(times, 'call')} turned away so far"
        case n.HolderAway(_, name, stage, steps, seconds):
            redo = f"a rollback would redo {plural(steps, 'step')} ({duration(seconds)})"
            return f"waiting for {_peer(name, stage)} to reconnect: {redo}"
        case n.NoSpareLeft():
            return "no spare left: the next loss stops the run until one more peer joins"
        case n.PeerRests(_, name, stage, until):
            return f"{_peer(name, stage)} rests {until_when(until)}"
        case n.PeerWoke(_, name):
            return f"{name} is awake again"
        case n.PeerLeft(_, name, stage):
            return f"{_peer(name, stage)} left the run as requested"
        case n.PeerDismissed(_, name, stage, reason):
            return f"dismissed {_peer(name, stage)}: {loss(reason)}"
        case n.StagesAssigned(generation, layers, holders):
            cut = f"{plural(len(layers), 'stage')} of {'+'.join(map(str, layers))} layers"
            return f"generation {generation}: {cut}, held by {', '.join(holder.name for holder in holders)}"
        case n.StagesLinked(generation):
            return f"generation {generation}: all stages are linked"
        case n.StagePrepared(_, name, stage, step):
            return f"{name} has built stage {stage} from {_mark(step)}, should the holder not come back"
        case n.PartNotThere(_, name, stage, step):
            return f"{name} does not have stage {stage}'s part of {_mark(step)}, though it said so; it has to fetch it"
        case reseat.StageReseating() | reseat.StageReseated() | reseat.StageNotReseated():
            return about_reseating(notice)
        case audit.NobodyAudits():
            return about_audits(notice)
        case audit.StageAudited() | audit.AuditGivenUp():
            return about_audits(notice)
        case audit.StageAccused() | audit.AuditorsDisagree() | audit.HolderWatched():
            return about_audits(notice)
        case n.Relinking(_, name, stage, reason):
            return f"trouble at {_peer(name, stage)}: {loss(reason)}; relinking all stages"
        case n.StageGivenUp(_, name, stage, reason):
            return f"{_peer(name, stage)} becomes a spare and is asked last for an hour: {loss(reason)}"
        case n.Stalled(work):
            return f"stalled, still waiting for {waiting(work)}; relinking all stages"
        case n.RolledBack(reason, step, redone):
            return f"rolled back to {_mark(step)}, {plural(redone, 'step')} to redo: {rollback(reason)}"
        case n.SnapshotComplete(step):
            return f"saved the snapshot at step {step}"
        case n.CheckpointCut(path, sha256, layers, tied):
            made = f"made the first snapshot, {plural(len(layers), 'part')}, from {path} (sha256 {sha256})"
            return made + ("; the tied head starts as a copy of the embedding" if tied else "")
        case n.SnapshotSkipped(step, uploading):
            return f"skipped the snapshot at step {step}: the one from step {uploading} is still uploading"
        case n.SnapshotWithoutRoom(step, missing):
            lacks = f"the coordinator's disk lacks {size(missing)}"
            return f"skipped the snapshot at step {step}: {lacks}; retrying after every step"
        case n.SnapshotFailed(step, stage, peer, name, reason):
            who = "the coordinator" if peer is None else name or peer
            return f"could not save {part_of(stage, step)}: {who}: {part_failure(reason)}"
        case n.SnapshotUnusable(step, detail):
            return f"the snapshot at step {step} is unusable: {detail}; what is left of it is set aside"
        case (
            n.CopyFailed()
            | n.CopyingLast()
            | n.CopyAbandoned()
            | n.CopyUnreachable()
            | n.PartRestored()
            | n.PartDamaged()
        ):
            return about_copies(notice)
        case n.StoreKeyMade() | n.StoreNotDirect() | n.JournalNotCopied() | n.StoredUnusable() | n.TookOver():
            return about_store(notice)
        case rebuilding.JournalRefused() | rebuilding.SnapshotSetAside() | rebuilding.JournalRebuilt():
            return about_rebuilding(notice)
        case n.Paused(reason, run):
            return pause(reason, run)
        case n.Resumed():
            return "resumed by the owner"
        case n.Continuing(step, steps, snapshot):
            newest = f"snapshot at step {snapshot}" if snapshot else "no snapshot yet"
            return f"continuing after step {step} of {steps} ({newest})"
        case n.RunDone(steps):
            return f"the run is done after {plural(steps, 'step')}"
        case n.RunStopped(step, path):
            command = f"`pmtrain coordinator --resume --dir {path}`"
            return f"stopped by the owner, {_saved(step)}; continue with {command}"
        case n.Interrupted(step, path):
            command = f"`pmtrain coordinator --resume --dir {path}`"
            return f"interrupted after step {step}; the peers wait, continue with {command}"
        case n.NotifyFailed(target, detail):
            return f"no message reached {target} ({detail}): the run goes on, and the next message is tried again"
        case n.DiskFailed(path, detail):
            return f"cannot write to {path}: {detail}; mend that and start the coordinator again"
        case n.Ended(_, detail):
            return detail
        case _:
            assert_never(notice)


# Reasons


def loss(reason: r.Loss) -> str:
    """After "lost desk (stage 2): "."""
    match reason:
        case r.NoHeartbeat(seconds):
            return f"no heartbeat for {duration(seconds)}"
        case r.ConnectionClosed():
            return "the connection closed"
        case r.NotRenewed():
            return "the certificate has expired, and was not renewed"
        case r.AskedToLeave():
            return "left the run"
        case r.AskedToRest():
            return "rests"
        case r.HashMismatch(what):
            return f"computed a different {what} (hash mismatch)"
        case r.DamagedBasis(version):
            return f"received basis {version} damaged (hash mismatch)"
        case r.FalseClaim(stage):
            return f"said that it has stage {stage} in memory, which it was never given"
        case r.TooSlow(stage, doing, seconds):
            work = {
                "build": f"build stage {stage}",
                "restore": f"restore stage {stage} from a snapshot",
                "reuse": f"continue with stage {stage} from memory",
                "link": f"link stage {stage}",
                "step": f"finish the first step with stage {stage}",
                "task": f"report on stage {stage}",
            }
            return f"did not {work[doing]} within {duration(seconds)}"
        case r.PartNotProved(stage, step):
            return f"could not prove that it has {part_of(stage, step)}"
        case r.CameAndWent(_, times):
            return f"came back {plural(times, 'time')} before a step was done"
        case r.UnsoundNumbers(stage, steps):
            alone = "as no other stage had"
            return f"had a non-finite loss or gradient of stage {stage} in {plural(steps, 'step')} in a row, {alone}"
        case r.PartUnreadable(step):
            return f"could not read a part of the snapshot at step {step}"
        case r.SpoiltSnapshots(_, snapshots, why):
            return f"spoilt {plural(snapshots, 'snapshot')} in a row: {part_failure(why)}"
        case r.Kicked():
            return "kicked by the run's owner"
        case r.PeerReport(trouble):
            return troubles.in_words(trouble)
        case r.InvalidMessage(detail):
            return f"sent an invalid message: {detail}"
        case r.TooManyMessages(per_second):
            return f"sent more than {per_second:g} messages a second unasked"
        case r.NotReading(messages):
            return f"left {messages:,} messages unread"
        case r.UnprocessableMessage(event):
            return f"sent a message that the coordinator could not process ({event}); see coordinator.log"
        case r.InvalidBasis(detail):
            return f"sent an invalid basis: {detail}"
        case MessagesDiffer():
            return differ(reason)
        case AuditFailed():
            return lied(reason)
        case FalseVerdicts():
            return contradicted(reason)
        case _:
            assert_never(reason)


def dismissal(reason: r.Dismissal) -> tuple[str, str]:
    """What the peer that is sent away reads: why, and what to do."""
    match reason:
        case r.RunFinished():
            return "the run is done", ""
        case r.RunStopped(step):
            return f"the run was stopped by the owner, {_saved(step)}", ""
        case r.AskedToLeave():
            return "left the run", ""
        case r.HashMismatch():
            fix = "install the coordinator's version of pmtrain; if the versions agree, test this machine's memory"
        case r.TooSlow(_, "step"):
            fix = "use a faster machine"
        case r.TooSlow(_, doing):
            fix = f"use a faster machine, or ask the run's owner to raise limits.{doing}_seconds"
        case r.Kicked():
            fix = "ask the run's owner"
        case r.SpoiltSnapshots():
            fix = "check this machine's disk, upload speed and version of pmtrain, then join again"
        case AuditFailed() | FalseVerdicts():
            fix = "test this machine's memory and GPU, and install the coordinator's version of pmtrain"
        case (
            r.DamagedBasis()
            | MessagesDiffer()
            | r.FalseClaim()
            | r.PartNotProved()
            | r.PartUnreadable()
            | r.UnsoundNumbers()
            | r.CameAndWent()
            | r.PeerReport()
            | r.InvalidMessage()
            | r.TooManyMessages()
            | r.NotReading()
            | r.UnprocessableMessage()
            | r.InvalidBasis()
        ):
            fix = "join again; if the same happens again, tell the run's owner"
        case _:
            assert_never(reason)
    return f"dismissed: {loss(reason)}", fix


def part_failure(reason: f.PartFailure) -> str:
    """After "could not save stage 2's part of the snapshot at step 6: desk: "."""
    match reason:
        case f.NotWritten(detail):
            return detail
        case f.TooLarge(found, most):
            return f"the part has {size(found)}, and may have {size(most)} at most"
        case f.NoRoom(missing):
            return f"the coordinator's disk lacks {size(missing)}"
        case f.NoTensors(detail):
            return f"the part is not a safetensors file: {detail}"
        case f.WrongTensor(tensor, found="", right=right):
            return f"the part lacks {tensor} ({right})"
        case f.WrongTensor(tensor, found, right=""):
            return f"the part has {tensor} ({found}), which the stage does not have"
        case f.WrongTensor(tensor, found="not finite"):
            return f"the part's {tensor} is not finite"
        case f.WrongTensor(tensor, found, right):
            return f"the part's {tensor} is {found} instead of {right}"
        case f.Overdue(seconds):
            return f"the part was not uploaded within {duration(seconds)}"
        case _:
            assert_never(reason)


def pause(reason: r.Pause, run: str) -> str:
    """The whole sentence, for the owner."""
    resume = f"continue with `pmtrain resume {run}`"
    match reason:
        case r.ByOwner():
            return f"paused by the owner; {resume}"
        case r.NonFinite(lr=lr):
            advice = f"lower optimizer.lr ({lr:g}) or lengthen the warm-up in a new run"
            return f"paused: {rollback(reason)}; {advice}, or {resume}"
        case _:
            assert_never(reason)


def pause_for_peers(reason: r.Pause, run: str) -> str:
    """Likewise, for those who can only wait."""
    match reason:
        case r.ByOwner():
            return f"{run} is paused by the owner after this step"
        case r.NonFinite():
            return f"{run} is paused until the owner resumes the run: {rollback(reason)}"
        case _:
            assert_never(reason)


def rollback(reason: r.Rollback) -> str:
    """After "rolled back to the snapshot at step 3, 2 steps to redo: "."""
    match reason:
        case r.StagesLost(stages, step):
            were = "was" if len(stages) == 1 else "were"
            return f"{_numbers(stages)} {were} lost after step {step}"
        case r.StageDiverged(holder, what, step):
            return f"{_stages([holder])} used a different {what} (hash mismatch), found after step {step}"
        case r.SnapshotDamaged(step):
            return f"the snapshot at step {step} is damaged"
        case r.NonFinite(steps, step):
            return f"{plural(steps, 'step')} in a row, up to step {step}, had a non-finite loss or gradient"
        case _:
            assert_never(reason)


def spare(reason: r.Spare) -> str:
    """What a peer without a stage reads, or one that holds on to its stage."""
    if isinstance(reason, r.Resting):
        return "resting: this peer has no stage until it wakes"
    if isinstance(reason, r.AllStagesHeld):
        return f"spare: {'the only stage has' if reason.stages == 1 else f'all {reason.stages} stages have'} a holder"
    if isinstance(reason, r.StageTried):
        return f"waiting for the first step with {reason.name} in stage {reason.stage}"
    return f"waiting for {waiting(reason)}"


# What a run waits for


def waiting(what: r.Waiting) -> str:
    """After "waiting for "."""
    match what:
        case r.StagesWorking():
            return _work(what)
        case r.StoreUnreachable(stage, step, url, detail):
            return f"the store {url}, which has {part_of(stage, step)}: {detail}"
        case r.SnapshotIncomplete(step):
            return f"the snapshot at step {step} to be uploaded"
        case r.SnapshotFailing(step, reason):
            return f"the snapshot at step {step} to be retried: {part_failure(reason)}"
        case r.OwnersResume():
            return "the owner to resume the run"
        case r.SubspaceReport(step):
            return f"the last stage to report on the subspace after step {step}"
        case r.BasisNotTaken(version, holders):
            return f"{_stages(holders)} to take basis {version}"
        case r.Reseating(stage, holder, spare):
            return f"stage {stage} to be re-seated from {holder} to {spare}: {faster(what)}"
        case r.Coordinator():
            return "the coordinator"
        case r.CoordinatorStopped():
            return "the coordinator to be started again"
        case r.NoPeers():
            return "peers to join"
        case r.CoordinatorRestarted():
            return "the peers from before the restart to reconnect"
        case r.CheckpointUncut(path):
            return f"the first snapshot to be cut from {path}"
        case r.HoldersDisconnected(stages):
            return f"the {'holder' if len(stages) == 1 else 'holders'} of {_numbers(stages)} to reconnect"
        case r.StagesWithoutPeer(stages, too_small):
            vacant = " and ".join(f"stage {s.stage} ({_with_host(s)})" for s in stages)
            more = "one more peer" if len(stages) == 1 else f"{len(stages)} more peers"
            if not too_small:
                return f"{more}: nobody holds {vacant}"
            have = "the free peer has" if too_small == 1 else f"the {too_small} free peers have"
            return f"{more} with more memory: nobody holds {vacant}, and {have} too little for it"
        case _:
            unusable = f" ({plural(what.unusable, 'more peer')} reported an unusable speed)" if what.unusable else ""
            return no_placement(what) + unusable


def _work(work: r.StagesWorking) -> str:
    match work.task:
        case "build":
            doing = f"restore step {work.step}" if work.step else "build"
        case "link":
            doing = "link"
        case "step":
            doing = f"finish step {work.step}"
        case "sync":
            doing = f"report the hashes after step {work.step}"
        case "evaluation":
            doing = f"evaluate step {work.step}"
        case "finish":
            doing = "hash the final weights"
        case _:
            assert_never(work.task)
    return f"{_stages(work.holders)} to {doing} ({duration(round(work.seconds))} so far)"


def _with_host(need: r.StageNeed) -> str:
    return size(need.need) + (f" + {size(need.on_host)} of host memory" if need.on_host else "")


# Words


def _peer(name: str, stage: int | None) -> str:
    return f"{name} ({'spare' if stage is None else f'stage {stage}'})"


def _of(person: str) -> str:
    return f", with the token for {person}" if person else ""


def _saved(step: int) -> str:
    return f"saved up to step {step}" if step else "nothing was saved yet"


def _stages(holders: Sequence[r.Holder]) -> str:
    each = ", ".join(f"{h.stage} ({h.name})" if h.name else str(h.stage) for h in holders)
    return f"stage{'' if len(holders) == 1 else 's'} {each}"


def _numbers(stages: Sequence[int]) -> str:
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"


def not_direct(why: paths.NotDirect) -> str:
    match why:
        case paths.NobodyLetIn(stage, punch):
            return f"neither router lets connections in{_not_punched(stage, punch)}"
        case paths.NoDirectAnswer(stage, punch):
            return f"no answer at any address that one of them has for the other{_not_punched(stage, punch)}"
        case paths.Punched():
            return "neither router lets connections in, so both ends connected at the same moment"
        case _:
            assert_never(why)


def _not_punched(stage: int, why: str) -> str:
    return f"; {not_punched(why, f'stage {stage}', f'stage {stage + 1}')}" if why else ""
