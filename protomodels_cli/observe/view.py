"""A run on a terminal: the same picture for `status`, `status --watch` and the demo."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protomodels_cli.quantities import duration, plural, rate, size
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

LONG = 2.0  # seconds: shorter waits of a running run are not shown


def phase(s: pb.RunStatus) -> str:
    """For people."""
    return _words(pb.RunStatus.Phase, s.phase)


def _words(enum: Any, value: int) -> str:
    return enum.Name(value).lower().replace("_", " ") if value in enum.values() else "unknown"


def headline(s: pb.RunStatus) -> str:
    """The run in one line."""
    parts = [f"{s.name}: {phase(s)}", f"step {s.step}/{s.steps} ({100 * s.step / s.steps:.1f} %)"]
    if s.HasField("loss"):
        parts.append(f"loss {s.loss:.4f}")
    if s.HasField("eval_loss"):
        parts.append(f"held-out {s.eval_loss:.4f}")
    if s.tokens_per_s:
        parts.append(rate(s.tokens_per_s, "tok/s"))
    if s.HasField("eta_s") and s.phase == pb.RunStatus.RUNNING:
        parts.append(f"eta {duration(s.eta_s)}")
    return " | ".join(parts)


def picture(s: pb.RunStatus) -> RenderableType:
    rows: list[RenderableType] = [Text(headline(s), style="bold")]
    if s.phase == pb.RunStatus.RUNNING:
        rows.append(Padding(ProgressBar(total=s.steps, completed=s.step, width=72), 0))  # which ends its line
    if s.reason:
        rows.append(Text(s.reason, style="bold red"))
    elif s.waiting_for and (s.phase != pb.RunStatus.RUNNING or s.waiting_s > LONG):
        rows.append(Text(f"waiting for {s.waiting_for}", style="yellow"))
    if s.trouble:
        rows.append(Text(s.trouble, style="yellow"))
    if s.stages:
        rows.append(stage_table(s))
    if s.checkpoint_sha256:
        rows.append(Text(f"started from {s.checkpoint} (sha256 {s.checkpoint_sha256})", style="dim"))
    if s.snapshot_step or s.steps_redone:
        saved = f"saved up to step {s.snapshot_step}" if s.snapshot_step else "nothing saved yet"
        redone = f" | rolled back {s.rollbacks} ×, {plural(s.steps_redone, 'step')} redone" if s.rollbacks else ""
        rows.append(Text(saved + redone, style="dim"))
    if s.HasField("crash_redo_s"):
        rows.append(Text(crash(s), style="dim"))
    return Group(*rows)


def crash(s: pb.RunStatus) -> str:
    """What it would cost if a stage were lost now."""
    redo = f"{plural(s.step - s.snapshot_step, 'step')} to redo ({duration(s.crash_redo_s)})"
    if not s.HasField("crash_restore_s"):
        return f"a crash now would cost {redo}, and what fetching a part and building its stage takes"
    restore = f"{duration(s.crash_restore_s)} to fetch a part and build its stage"
    return f"a crash now would cost about {duration(s.crash_redo_s + s.crash_restore_s)}: {redo}, {restore}"


def stage_table(s: pb.RunStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in ("stage", "layers", "peer", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("compute", "wait", "wire", "B/token →", "B/token ←", "vs bf16", "memory", "forecast"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in s.stages:
        shares = (stage.compute_share, stage.wait_share, stage.wire_share)
        table.add_row(
            str(stage.stage),
            f"{stage.first_layer}–{stage.end_layer - 1}",
            # Peers choose their names: no markup of theirs.
            Text(", ".join(holder.name or holder.peer for holder in stage.holders)),
            _words(pb.StageStatus.State, stage.state),
            *(f"{share:.0%}" for share in shares),
            *(f"{b:.1f}" if b else "–" for b in (stage.forward_bytes_per_token, stage.backward_bytes_per_token)),
            f"{stage.ratio_bf16:.1f} ×" if stage.ratio_bf16 else "–",
            *(size(b) if b else "–" for b in (stage.peak_memory, stage.forecast_memory)),
        )
    return table


def peer_table(s: pb.RunStatus) -> RenderableType:
    if not s.peers:
        return Text("no peer is connected")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in ("peer", "name", "state", "device", "free memory", "speed", "address", "dialled", "joined"):
        table.add_column(name, no_wrap=True)
    for p in s.peers:
        table.add_row(
            p.peer,
            Text(p.name),
            _state(p),
            Text(p.device),
            size(p.memory),
            rate(p.flops, "FLOP/s"),
            p.address,
            "directly" if p.reachable else "by relay",
            f"{duration(p.joined_s)} ago",
        )
    return table


def _state(p: pb.PeerStatus) -> str:
    match p.state:
        case pb.PeerStatus.HOLDING:
            return f"holds stage {p.stage}"
        case pb.PeerStatus.LEAVING:
            return f"leaving stage {p.stage}"
        case _:
            return "spare"
