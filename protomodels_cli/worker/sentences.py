"""How a peer's notices and problems read: the one place where they become English. Nothing reads them back."""

from __future__ import annotations

import math
from typing import assert_never

from protomodels_cli.observe.punches import not_punched
from protomodels_cli.observe.troubles import in_words
from protomodels_cli.quantities import duration, plural, rate, size, until_when
from protomodels_cli.wire import troubles as t
from protomodels_cli.wire.path import PUNCHED
from protomodels_cli.worker import notices as n
from protomodels_cli.worker import problems as p

SAME_VERSION = "install the same version of pmtrain on both sides"


def sentence(notice: n.Notice) -> str:
    """What whoever runs the peer reads."""
    match notice:
        case n.CoordinatorUnreachable() | n.Joined() | n.Reachable() | n.NotReachable() | n.LinkEmulated():
            return _joining(notice)
        case n.Rests() | n.Wakes() | n.Capped() | n.PowerLimited() | n.PowerNotLimited() | n.PowerNotRestored():
            return _joining(notice)
        case n.RenewalFailed() | n.CertificateExpired() | n.PortMapped() | n.PortNotMapped():
            return _joining(notice)
        case n.ConnectionLost() | n.LinkRelayed() | n.LinkDirect() | n.RelayFailed() | n.RelayWorks():
            return _connection(notice)
        case n.TroubleReported() | n.LinkNotPunched():
            return _connection(notice)
        case n.PartFailed() | n.PartUploaded() | n.StoreNotReached() | n.PartRefused() | n.PartsNotDeleted():
            return _snapshot(notice)
        case n.Prefetched() | n.PrefetchFailed():
            return _snapshot(notice)
        case n.Spare(_, detail):
            return detail
        case n.Resumed():
            return "the run goes on"
        case n.Waiting(_, detail, stage) | n.Paused(_, detail, stage):
            return detail if stage is None else f"{detail}; stage {stage} stays in memory"
        case n.Preparing(stage, step):
            mark = f"the snapshot at step {step}" if step else "the beginning"
            return f"building stage {stage} from {mark}, in case it is given to this peer"
        case n.StageAssigned():
            return _assigned(notice)
        case n.Computing():
            return _computing(notice)
        case n.Building():
            return "building the stage; operators are compiled first, which may take a minute"
        case n.NotCompiled(detail):
            return f"operators could not be compiled ({detail}): this peer works without, slower and with more memory"
        case n.NotPinned(detail):
            return (
                f"host memory could not be pinned ({detail}): messages go through ordinary memory, slower; where a "
                "limit on locked memory is the cause, raise it (`ulimit -l`; Docker: `--ulimit memlock=-1`)"
            )
        case n.StepDecided():
            return _step(notice)
        case n.HashMismatch(what, stage):
            return f"computed a different {what} (hash mismatch); the coordinator will assign stage {stage} again"
        case n.LeavingAfterStep():
            return "leaving after this step (Ctrl-C again leaves at once)"
        case n.LeavingAtOnce():
            return "leaving at once: there is no connection to the coordinator"
        case n.Released(_, detail) | n.Ended(_, detail):
            return detail
        case _:
            assert_never(notice)


def _step(s: n.StepDecided) -> str:
    outcome = "" if s.applied else " (skipped: the loss or a gradient is not finite)"
    pace = "" if s.eta_s is None else f" | {rate(s.tokens_per_s, 'tok/s')} | eta {duration(s.eta_s)}"
    done = f" | done here: {plural(s.done, 'step')}, {size(s.sent)} sent"
    return f"step {s.step}/{s.steps} | loss {s.loss:.4f}{outcome}{pace}{done}"


def _joining(notice: n.AboutJoining) -> str:
    match notice:
        case n.CoordinatorUnreachable(detail, seconds):
            return f"{detail}; retrying for up to {duration(seconds)}"
        case n.Joined(run, name, peer, device, memory, flops):
            return f"joined {run} as {name} ({peer}): {device}, {size(memory)} free, {rate(flops, 'FLOP/s')}"
        case n.Reachable(address):
            return f"neighbours can dial {address}"
        case n.NotReachable(host, port, detail):
            return (
                f"neighbours elsewhere cannot dial this machine ({detail}): links that find no other way are relayed, "
                f"which is slower; to be dialled directly, let TCP port {port} of {host} in (in the router: forward "
                f"the port to this machine) and keep the port with --port {port}"
            )
        case n.RenewalFailed(detail, seconds):
            return f"this peer's certificate was not renewed ({detail}); it ends in {duration(seconds)}, trying again"
        case n.CertificateExpired():
            return "this peer's certificate has expired while it was away: joining again"
        case n.PortMapped(address, port, by):
            return f"the router leads {address} to TCP port {port} of this machine ({by}), until this peer leaves"
        case n.PortNotMapped(port, detail):
            return f"the router does not lead a port to TCP port {port} of this machine ({detail}); going on without"
        case n.Rests(until):
            return f"resting {until_when(until)}: the step is finished and the stage handed over first (Ctrl-C leaves)"
        case n.Wakes():
            return "awake again: ready for a stage"
        case n.Capped(upload, download):
            each = [f"{way} {rate(cap, 'bit/s')}" for way, cap in (("sends", upload), ("receives", download)) if cap]
            return f"{' and '.join(each)} at most, all traffic of this peer counted"
        case n.PowerLimited(watts):
            return f"each card draws {watts:g} W at most, until this peer ends"
        case n.PowerNotLimited(watts, detail):
            return f"the power limit of {watts:g} W is not set ({detail}): this peer computes at full power"
        case n.PowerNotRestored(watts, detail):
            fix = f"set it with `nvidia-smi -pl {watts:g}`"
            return f"the card keeps the limit, and had {watts:g} W before ({detail}): {fix}"
        case n.LinkEmulated(link):
            return f"the run emulates a slow connection for every peer (wire.link): {link}"
        case _:
            assert_never(notice)


def _assigned(assigned: n.StageAssigned) -> str:
    first, last = assigned.first_layer, assigned.end_layer - 1
    parts = ["embedding"] * (assigned.stage == 0)
    parts += [f"layer {first}" if first == last else f"layers {first}–{last}"]
    parts += ["head"] * (assigned.stage == assigned.stages - 1)
    match assigned.source:
        case "seed":
            source = ""
        case "snapshot":
            source = f", restoring step {assigned.step}"
        case "memory":
            source = f", reusing step {assigned.step} in memory"
        case _:
            assert_never(assigned.source)
    stage = f"stage {assigned.stage} of {assigned.stages}"
    return f"generation {assigned.generation}: assigned {stage} ({', '.join(parts)}){source}"


def _computing(c: n.Computing) -> str:
    chosen = f"auto, on {c.device}" if c.dtype_is_own else "compute.dtype"
    operators = "compiled" if c.compiled else "plain"
    held = plural(c.in_flight, "microbatch", "microbatches")
    takes = f"takes up to {size(c.need)} of {size(c.memory)} with {held} in flight"
    again = {"none": "nothing", "block": "each block", "stage": "the whole stage"}[c.recompute]
    match c.reason:
        case "asked":
            why = "compute.recompute"
        case "fits":
            why = "auto, it all fits"
        case "saves":
            why = f"auto, as keeping activations would take {size(c.kept_need)}"
        case "tight":
            why = "the least there is, and it may not fit"
        case _:
            assert_never(c.reason)
    return f"computes in {c.dtype} ({chosen}) with {operators} operators; computes {again} again ({why}); {takes}"


def _connection(notice: n.AboutConnections) -> str:
    match notice:
        case n.ConnectionLost(reason, stage):
            held = "" if stage is None else f"; stage {stage} stays in memory"
            return f"lost the connection to the coordinator: {loss(reason)}{held}; reconnecting"
        case n.LinkRelayed(stage, path):
            through = "the coordinator" if path == "door" else path
            return f"the link to stage {stage} goes through {through}; looking for a direct path meanwhile"
        case n.LinkDirect(stage, path):
            how = "punched: both ends connected at the same moment" if path == PUNCHED else path
            return f"the link to stage {stage} is direct now ({how})"
        case n.LinkNotPunched(stage, why):
            return f"the link to stage {stage} stays relayed: {not_punched(why, 'this machine', 'the other')}"
        case n.RelayFailed(stage, detail):
            return f"the relayed link to stage {stage} does not work: {detail}; retrying"
        case n.RelayWorks(stage):
            return f"the relayed link to stage {stage} works again"
        case n.TroubleReported(trouble):
            return f"reported to the coordinator: {in_words(trouble)}"
        case _:
            assert_never(notice)


def _snapshot(notice: n.AboutSnapshots) -> str:
    match notice:
        case n.PartFailed(step, stage, detail):
            return f"could not save {_part(stage, step)}: {detail}"
        case n.PartUploaded(step, stage, to_store):
            return f"uploaded {_part(stage, step)}{' to the store' * to_store}"
        case n.StoreNotReached(host, detail):
            return f"cannot use the store at {host}: {detail}; parts go through the coordinator"
        case n.PartRefused(step, stage, detail):
            return f"the coordinator refused {_part(stage, step)}: {detail}"
        case n.PartsNotDeleted(path, detail):
            return f"could not delete old parts of snapshots in {path}: {detail}"
        case n.Prefetched(step):
            return f"prefetched the snapshot at step {step}, in case a stage needs a holder"
        case n.PrefetchFailed(step, detail):
            return f"could not prefetch the snapshot at step {step}: {detail}"
        case _:
            assert_never(notice)


def loss(reason: p.Loss) -> str:
    """The words that follow "lost the connection to the coordinator: "."""
    match reason:
        case p.AddressChanged():
            return "this machine has another address"
        case p.NoHeartbeat(seconds):
            return f"no heartbeat for {duration(seconds)}"
        case p.ConnectionClosed():
            return "the coordinator closed the connection"
        case p.NetworkFailed(detail):
            return detail
        case p.MessageMissing(number):
            return f"message {number} from the coordinator did not arrive"
        case p.BasisDamaged(version):
            return f"basis {version} arrived damaged (hash mismatch)"
        case _:
            assert_never(reason)


def problem(found: p.Problem) -> tuple[str, str]:
    """Why the peer ends, and what to do."""
    match found:
        case p.NeverConnected(reason):
            return (
                f"lost the connection to the coordinator before the first message: {loss(reason)}",
                "check your connection and that the coordinator runs, then join again",
            )
        case p.GaveUp(seconds):
            return (
                f"gave up: the coordinator could not be reached for {duration(seconds)}",
                "check your connection and that the coordinator runs, then join again; to wait longer: "
                "--give-up-after TIME",
            )
        case p.Dismissed(_, text, fix):
            return text, fix
        case t.OutOfMemory():
            fix = (
                "close other programs or join with a higher --memory, or ask the run's owner for smaller microbatches "
                "(raise batch.microbatches), compute.recompute: auto or fewer layers a stage"
            )
        case t.DeviceStuck():
            fix = (
                "if the device hangs, restart the machine or use another device (--device); if the device is only "
                "slow, ask the run's owner for more microbatches or a higher limits.device_seconds"
            )
        case t.PartNotWritten():
            fix = "free some space, or name another folder with --dir, and join again"
        case t.Failed():
            fix = "join again; if the same happens again, report peer.log"
        case _:
            return _before_joining(found)
    return in_words(found), fix


def _before_joining(found: p.BeforeJoining) -> tuple[str, str]:
    match found:
        case p.NoSuchDevice(device, detail):
            return f"--device {device}: {detail}", "use auto, cpu, mps, or a GPU that this machine has"
        case p.OtherPackage(point, theirs, ours):
            here = "which is not installed here" if ours is None else f"and {ours} is installed here"
            return f"the run uses {point} of {theirs}, {here}", f"install {theirs}"
        case p.SpecNotUnderstood(detail):
            return f"this pmtrain does not understand the run's spec: {detail}", SAME_VERSION
        case p.SpecReadDifferently():
            return (
                "this pmtrain reads the run's spec differently from the coordinator's (hash mismatch)",
                SAME_VERSION,
            )
        case p.ClockSkew(seconds):
            side = "ahead of" if seconds > 0 else "behind"
            return (
                f"this machine's clock is {duration(abs(seconds))} {side} the coordinator's",
                "set both clocks from the network (timedatectl set-ntp true)",
            )
        case p.FolderNotWritable(path, detail):
            return f"cannot write to {path}: {detail}", "name another folder with --dir"
        case p.DiskTooSmall(path, free, need):
            return (
                f"{path} has {size(free)} free, and a snapshot of the smallest stage needs {size(need)}",
                "free some space, or name another folder with --dir",
            )
        case p.DeviceTooSmall(device, free, need):
            return (
                f"the smallest stage needs {size(need)}, and {device} has {size(free)} free",
                "close other programs, use another device, or ask the run's owner for more stages",
            )
        case p.HostTooSmall(free, need):
            return (
                f"the smallest stage needs {size(need)} of host memory for codecs, and this machine has "
                f"{size(free)} free",
                "close other programs, use a machine with more memory, or ask the run's owner for another codec",
            )
        case p.MemoryOptionTooLow(device, allowed, free, need):
            enough = math.ceil(need / 2**30 * 1000) / 1000
            return (
                f"the smallest stage needs {size(need)}, and --memory allows {size(allowed)} of the {size(free)} free "
                f"on {device}",
                f"allow --memory {enough:g}gib or more, or ask the run's owner for more stages",
            )
        case p.PortNotOpened(port):
            return f"cannot listen on port {port}", "choose another with --port, or leave --port out"
        case _:
            assert_never(found)


def _part(stage: int, step: int) -> str:
    return f"stage {stage}'s part of the snapshot at step {step}"
