"""The one place that checks how a peer's words read. Everywhere else kinds and fields are checked."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import make_spec
from wording import check_kinds, check_row, check_wording, facts_of, members

from protomodels_cli.coordinator.messages import event_of
from protomodels_cli.coordinator.reasons import PeerReport
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC
from protomodels_cli.facts import Fact
from protomodels_cli.observe.troubles import in_words
from protomodels_cli.wire import troubles as t
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import notices as n
from protomodels_cli.worker import problems as p
from protomodels_cli.worker.sentences import loss, problem, sentence
from protomodels_cli.worker.telling import PeerError

GIB = 1 << 30

NOTICES: list[tuple[n.Notice, str]] = [
    (
        n.CoordinatorUnreachable("nothing listens at 203.0.113.7:7420", 24 * 3600.0),
        "nothing listens at 203.0.113.7:7420; retrying for up to 24 h",
    ),
    (
        n.Joined("tiny", "desk", "p12", "cpu", 22 * GIB, 56.7e9),
        "joined tiny as desk (p12): cpu, 22 GiB free, 56.7 GFLOP/s",
    ),
    (n.Reachable("198.51.100.23:42707"), "neighbours can dial 198.51.100.23:42707"),
    (
        n.NotReachable("198.51.100.23", 42707, "no answer"),
        "neighbours elsewhere cannot dial this machine (no answer): links that find no other way are relayed, which is "
        "slower; to be dialled directly, let TCP port 42707 of 198.51.100.23 in (in the router: forward the port to "
        "this machine) and keep the port with --port 42707",
    ),
    (
        n.RenewalFailed("cannot reach the coordinator: no answer", 7200.0),
        "this peer's certificate was not renewed (cannot reach the coordinator: no answer); it ends in 2 h, trying "
        "again",
    ),
    (n.CertificateExpired(), "this peer's certificate has expired while it was away: joining again"),
    (
        n.PortMapped("198.51.100.23:7421", 7421, "UPnP"),
        "the router leads 198.51.100.23:7421 to TCP port 7421 of this machine (UPnP), until this peer leaves",
    ),
    (
        n.PortNotMapped(7421, "no answer"),
        "the router does not lead a port to TCP port 7421 of this machine (no answer); going on without",
    ),
    (
        n.LinkEmulated("10 Mbit/s, 25 ms of latency"),
        "the run emulates a slow connection for every peer (wire.link): 10 Mbit/s, 25 ms of latency",
    ),
    (
        n.Rests(0.0),
        "resting until it is woken: the step is finished and the stage handed over first (Ctrl-C leaves)",
    ),
    (n.PowerLimited(200.0), "each card draws 200 W at most, until this peer ends"),
    (
        n.PowerNotLimited(200.0, "there is no nvidia-smi here"),
        "the power limit of 200 W is not set (there is no nvidia-smi here): this peer computes at full power",
    ),
    (
        n.PowerNotRestored(350.0, "no permission"),
        "the card keeps the limit, and had 350 W before (no permission): set it with `nvidia-smi -pl 350`",
    ),
    (n.Wakes(), "awake again: ready for a stage"),
    (n.Capped(10e6, 50e6), "sends 10 Mbit/s and receives 50 Mbit/s at most, all traffic of this peer counted"),
    (n.Capped(0.0, 50e6), "receives 50 Mbit/s at most, all traffic of this peer counted"),
    (n.Spare("all_stages_held", "spare: all 4 stages have a holder"), "spare: all 4 stages have a holder"),
    (
        n.Waiting("no_peers", "waiting for peers to join", 2),
        "waiting for peers to join; stage 2 stays in memory",
    ),
    (n.Waiting("no_peers", "waiting for peers to join", None), "waiting for peers to join"),
    (n.StageAssigned(1, 1, 4, 2, 4, "seed", 0), "generation 1: assigned stage 1 of 4 (layers 2–3)"),
    (
        n.StageAssigned(3, 0, 2, 0, 1, "snapshot", 6),
        "generation 3: assigned stage 0 of 2 (embedding, layer 0), restoring step 6",
    ),
    (
        n.StageAssigned(4, 0, 1, 0, 4, "memory", 7),
        "generation 4: assigned stage 0 of 1 (embedding, layers 0–3, head), reusing step 7 in memory",
    ),
    (
        n.Computing("cpu", "float32", True, False, "none", "fits", 4, GIB, 22 * GIB, GIB),
        "computes in float32 (auto, on cpu) with plain operators; computes nothing again (auto, it all fits); "
        "takes up to 1 GiB of 22 GiB with 4 microbatches in flight",
    ),
    (
        n.Computing("NVIDIA H200", "bf16", False, True, "stage", "saves", 32, 9 * GIB, 16 * GIB, 40 * GIB),
        "computes in bf16 (compute.dtype) with compiled operators; computes the whole stage again (auto, as keeping "
        "activations would take 40 GiB); takes up to 9 GiB of 16 GiB with 32 microbatches in flight",
    ),
    (
        n.Computing("NVIDIA H200", "bf16", True, True, "block", "asked", 1, 9 * GIB, 16 * GIB, 40 * GIB),
        "computes in bf16 (auto, on NVIDIA H200) with compiled operators; computes each block again "
        "(compute.recompute); takes up to 9 GiB of 16 GiB with 1 microbatch in flight",
    ),
    (
        n.Computing("cpu", "float32", False, False, "block", "tight", 2, 9 * GIB, 8 * GIB, 40 * GIB),
        "computes in float32 (compute.dtype) with plain operators; computes each block again (the least there is, and "
        "it may not fit); takes up to 9 GiB of 8 GiB with 2 microbatches in flight",
    ),
    (n.Preparing(2, 40), "building stage 2 from the snapshot at step 40, in case it is given to this peer"),
    (n.Preparing(2, 0), "building stage 2 from the beginning, in case it is given to this peer"),
    (n.Building(), "building the stage; operators are compiled first, which may take a minute"),
    (
        n.NotCompiled("no compiler here"),
        "operators could not be compiled (no compiler here): this peer works without, slower and with more memory",
    ),
    (
        n.NotPinned("CUDA error: out of memory"),
        "host memory could not be pinned (CUDA error: out of memory): messages go through ordinary memory, slower; "
        "where a limit on locked memory is the cause, raise it (`ulimit -l`; Docker: `--ulimit memlock=-1`)",
    ),
    (
        n.StepDecided(1, 300, 7.65812, True, 980.0, 90.0, 1, 2 << 20),
        "step 1/300 | loss 7.6581 | 980 tok/s | eta 1 min 30 s | done here: 1 step, 2 MiB sent",
    ),
    (n.Paused("by_owner", "tiny is paused by the owner", 2), "tiny is paused by the owner; stage 2 stays in memory"),
    (n.Paused("by_owner", "tiny is paused by the owner", None), "tiny is paused by the owner"),
    (n.Resumed(), "the run goes on"),
    (
        n.StepDecided(2, 300, float("nan"), False, 0.0, None, 2, 0),
        "step 2/300 | loss nan (skipped: the loss or a gradient is not finite) | done here: 2 steps, 0 B sent",
    ),
    (
        n.HashMismatch("T_fixed", 2),
        "computed a different T_fixed (hash mismatch); the coordinator will assign stage 2 again",
    ),
    (
        n.ConnectionLost(p.ConnectionClosed(), 2),
        "lost the connection to the coordinator: the coordinator closed the connection; stage 2 stays in memory; "
        "reconnecting",
    ),
    (
        n.ConnectionLost(p.NoHeartbeat(10.0), None),
        "lost the connection to the coordinator: no heartbeat for 10 s; reconnecting",
    ),
    (n.RelayFailed(0, "no answer"), "the relayed link to stage 0 does not work: no answer; retrying"),
    (
        n.LinkRelayed(1, "door"),
        "the link to stage 1 goes through the coordinator; looking for a direct path meanwhile",
    ),
    (
        n.LinkRelayed(1, "relay r.example:7430"),
        "the link to stage 1 goes through relay r.example:7430; looking for a direct path meanwhile",
    ),
    (n.LinkDirect(1, "lan"), "the link to stage 1 is direct now (lan)"),
    (
        n.LinkDirect(1, "punched"),
        "the link to stage 1 is direct now (punched: both ends connected at the same moment)",
    ),
    (
        n.LinkNotPunched(1, "port_changes_here"),
        "the link to stage 1 stays relayed: the router of this machine gives every connection another port",
    ),
    (n.RelayWorks(0), "the relayed link to stage 0 works again"),
    (n.TroubleReported(t.LinkBroken(2)), "reported to the coordinator: the link to stage 2 broke"),
    (
        n.PartFailed(6, 2, "No space left on device"),
        "could not save stage 2's part of the snapshot at step 6: No space left on device",
    ),
    (n.PartUploaded(6, 2), "uploaded stage 2's part of the snapshot at step 6"),
    (n.PartUploaded(6, 2, to_store=True), "uploaded stage 2's part of the snapshot at step 6 to the store"),
    (
        n.StoreNotReached("s3.home:9000", "no route"),
        "cannot use the store at s3.home:9000: no route; parts go through the coordinator",
    ),
    (
        n.PartRefused(6, 2, "too large"),
        "the coordinator refused stage 2's part of the snapshot at step 6: too large",
    ),
    (
        n.PartsNotDeleted("/peers/tiny/parts", "Read-only file system"),
        "could not delete old parts of snapshots in /peers/tiny/parts: Read-only file system",
    ),
    (n.Prefetched(6), "prefetched the snapshot at step 6, in case a stage needs a holder"),
    (
        n.PrefetchFailed(6, "No space left on device"),
        "could not prefetch the snapshot at step 6: No space left on device",
    ),
    (n.LeavingAfterStep(), "leaving after this step (Ctrl-C again leaves at once)"),
    (n.LeavingAtOnce(), "leaving at once: there is no connection to the coordinator"),
    (n.Released("run_finished", "the run is done"), "the run is done"),
    (n.Ended("clock_skew", "the clock is wrong"), "the clock is wrong"),
]

LOSSES: list[tuple[p.Loss, str]] = [
    (p.NoHeartbeat(10.0), "no heartbeat for 10 s"),
    (p.AddressChanged(), "this machine has another address"),
    (p.ConnectionClosed(), "the coordinator closed the connection"),
    (p.NetworkFailed("Socket closed"), "Socket closed"),
    (p.MessageMissing(7), "message 7 from the coordinator did not arrive"),
    (p.BasisDamaged(3), "basis 3 arrived damaged (hash mismatch)"),
]

TROUBLES: list[tuple[t.Trouble, str]] = [
    (t.LinkBroken(2), "the link to stage 2 broke"),
    (t.LinkBroken(2, "no answer"), "the link to stage 2 broke (no answer)"),
    (t.LinkNotOpened(2, "no answer"), "the link to stage 2 did not open: no answer"),
    (t.InvalidInput(2, "a damaged frame"), "received an invalid message from stage 2: a damaged frame"),
    (t.InvalidFeed(0, "token id 9"), "received an invalid message from the coordinator: token id 9"),
    (t.OutOfMemory("CUDA out of memory"), "the device ran out of memory: CUDA out of memory"),
    (
        t.DeviceStuck(240.0),
        "the device did not finish one piece of work within 4 min (limits.device_seconds)",
    ),
    (
        t.PartNotWritten("/peers/tiny: No space left on device"),
        "could not write the fetched part of a snapshot to disk: /peers/tiny: No space left on device",
    ),
    (t.Failed("KeyError: 7"), "failed: KeyError: 7"),
]

CHECK = "check your connection and that the coordinator runs, then join again"
PROBLEMS: list[tuple[p.Problem, int, str, str]] = [
    (
        p.NoSuchDevice("toaster", "no such device"),
        EXIT_SPEC,
        "--device toaster: no such device",
        "use auto, cpu, mps, or a GPU that this machine has",
    ),
    (
        p.OtherPackage("pmtrain.codecs:toydelta", "pmtrain-toy 0.1", None),
        EXIT_REFUSED,
        "the run uses pmtrain.codecs:toydelta of pmtrain-toy 0.1, which is not installed here",
        "install pmtrain-toy 0.1",
    ),
    (
        p.OtherPackage("pmtrain.codecs:toydelta", "pmtrain-toy 0.1", "pmtrain-toy 0.2"),
        EXIT_REFUSED,
        "the run uses pmtrain.codecs:toydelta of pmtrain-toy 0.1, and pmtrain-toy 0.2 is installed here",
        "install pmtrain-toy 0.1",
    ),
    (
        p.SpecNotUnderstood("wire.haste: is not a field of the spec"),
        EXIT_REFUSED,
        "this pmtrain does not understand the run's spec: wire.haste: is not a field of the spec",
        "install the same version of pmtrain on both sides",
    ),
    (
        p.SpecReadDifferently(),
        EXIT_REFUSED,
        "this pmtrain reads the run's spec differently from the coordinator's (hash mismatch)",
        "install the same version of pmtrain on both sides",
    ),
    (
        p.ClockSkew(3600.0),
        EXIT_REFUSED,
        "this machine's clock is 1 h ahead of the coordinator's",
        "set both clocks from the network (timedatectl set-ntp true)",
    ),
    (
        p.ClockSkew(-1200.0),
        EXIT_REFUSED,
        "this machine's clock is 20 min behind the coordinator's",
        "set both clocks from the network (timedatectl set-ntp true)",
    ),
    (
        p.FolderNotWritable("/peers", "Permission denied"),
        EXIT_OUTSIDE,
        "cannot write to /peers: Permission denied",
        "name another folder with --dir",
    ),
    (
        p.DiskTooSmall("/peers", GIB, 2 * GIB),
        EXIT_OUTSIDE,
        "/peers has 1 GiB free, and a snapshot of the smallest stage needs 2 GiB",
        "free some space, or name another folder with --dir",
    ),
    (
        p.DeviceTooSmall("cuda:0", GIB, 2 * GIB),
        EXIT_OUTSIDE,
        "the smallest stage needs 2 GiB, and cuda:0 has 1 GiB free",
        "close other programs, use another device, or ask the run's owner for more stages",
    ),
    (
        p.HostTooSmall(GIB, 2 * GIB),
        EXIT_OUTSIDE,
        "the smallest stage needs 2 GiB of host memory for codecs, and this machine has 1 GiB free",
        "close other programs, use a machine with more memory, or ask the run's owner for another codec",
    ),
    (
        p.MemoryOptionTooLow("cuda:0", GIB, 8 * GIB, 2 * GIB),
        EXIT_OUTSIDE,
        "the smallest stage needs 2 GiB, and --memory allows 1 GiB of the 8 GiB free on cuda:0",
        "allow --memory 2gib or more, or ask the run's owner for more stages",
    ),
    (
        p.PortNotOpened(80),
        EXIT_OUTSIDE,
        "cannot listen on port 80",
        "choose another with --port, or leave --port out",
    ),
    (
        p.NeverConnected(p.ConnectionClosed()),
        EXIT_OUTSIDE,
        "lost the connection to the coordinator before the first message: the coordinator closed the connection",
        CHECK,
    ),
    (
        p.GaveUp(24 * 3600.0),
        EXIT_OUTSIDE,
        "gave up: the coordinator could not be reached for 24 h",
        f"{CHECK}; to wait longer: --give-up-after TIME",
    ),
    (p.Dismissed("hash_mismatch", "dismissed: why", "join again", 5), 5, "dismissed: why", "join again"),
    (
        t.OutOfMemory("CUDA out of memory"),
        EXIT_OUTSIDE,
        "the device ran out of memory: CUDA out of memory",
        "close other programs or join with a higher --memory, or ask the run's owner for smaller microbatches (raise "
        "batch.microbatches), compute.recompute: auto or fewer layers a stage",
    ),
    (
        t.DeviceStuck(240.0),
        EXIT_OUTSIDE,
        "the device did not finish one piece of work within 4 min (limits.device_seconds)",
        "if the device hangs, restart the machine or use another device (--device); if the device is only slow, ask "
        "the run's owner for more microbatches or a higher limits.device_seconds",
    ),
    (
        t.PartNotWritten("/peers: No space left on device"),
        EXIT_OUTSIDE,
        "could not write the fetched part of a snapshot to disk: /peers: No space left on device",
        "free some space, or name another folder with --dir, and join again",
    ),
    (
        t.Failed("KeyError: 7"),
        EXIT_OUTSIDE,
        "failed: KeyError: 7",
        "join again; if the same happens again, report peer.log",
    ),
]

TABLE: list[tuple[Fact, str, str]] = [
    *((fact, sentence(fact), text) for fact, text in NOTICES),
    *((fact, loss(fact), text) for fact, text in LOSSES),
    *((fact, in_words(fact), text) for fact, text in TROUBLES),
    *((fact, " / ".join(problem(fact)), f"{text} / {fix}") for fact, _, text, fix in PROBLEMS),
]


@pytest.mark.parametrize(("fact", "found", "text"), TABLE, ids=lambda x: x.kind if isinstance(x, Fact) else "")
def test_what_is_said(fact: Fact, found: str, text: str):
    assert found == text


@pytest.mark.parametrize("text", sorted({text for _, _, text in TABLE}))
def test_a_sentence_stands_on_its_own(text: str):
    check_wording(text)


def test_every_kind_has_a_row_in_the_table():
    for union, rows in ((n.Notice, NOTICES), (p.Loss, LOSSES), (t.Trouble, TROUBLES), (p.Problem, PROBLEMS)):
        assert members(union) == {type(row[0]) for row in rows}
    assert set(facts_of(n, p, t)) == {type(row[0]) for row in TABLE}


def test_kinds_tell_facts_apart():
    check_kinds(facts_of(n))
    check_kinds(facts_of(p, t))


@pytest.mark.parametrize("notice", [notice for notice, _ in NOTICES], ids=lambda notice: notice.kind)
def test_an_event_is_a_row_of_json_with_its_kind_first(notice: n.Notice):
    check_row(notice)


@pytest.mark.parametrize(("found", "code"), [(row[0], row[1]) for row in PROBLEMS], ids=lambda x: getattr(x, "kind", x))
def test_a_problem_ends_a_peer_with_its_exit_code_and_its_fix(found: p.Problem, code: int):
    error = PeerError(found)
    assert (error.problem, error.kind, error.exit_code) == (found, found.kind, code)
    what, fix = problem(found)
    assert str(error) == f"{what}\n    fix:  {fix}"


@pytest.mark.parametrize("trouble", [row[0] for row in TROUBLES], ids=lambda trouble: trouble.kind)
def test_a_trouble_reaches_the_coordinator_as_what_it_is(trouble: t.Trouble):
    message = pb.PeerMessage(trouble=t.to_message(trouble, 3))
    event = event_of("p1", pb.PeerMessage.FromString(message.SerializeToString()), make_spec())
    assert event.what == PeerReport(trouble)
    assert event.generation == 3
    assert event.about == getattr(trouble, "stage", None), "none: the fault is the peer's own"


def test_a_trouble_of_a_kind_that_nobody_knows_is_the_peers_own():
    message = pb.Trouble(kind="toothache", detail="it\nhurts", about=1, generation=3)
    event = event_of("p1", pb.PeerMessage(trouble=message), make_spec())
    assert event.what == PeerReport(t.Failed("it hurts"))
    assert event.about is None
    assert dataclasses.asdict(event)["generation"] == 3
