"""A run on a terminal: the same picture for `status`, `top` and the demo; narrower tables where there is less room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protomodels_cli.quantities import duration, plural, rate, size, until_when
from protomodels_cli.wire.path import is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

NO_SPARE = "no spare: the next loss stops the run until one more peer joins"
MOST_SHOWN = 6  # names in a line
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
    rows += [Text(line, style="dim") for line in why_not_direct(s)]
    if waiting := spares(s):
        rows.append(Text(waiting, style="dim"))
    if rests := resting(s):
        rows.append(Text(rests, style="dim"))
    if s.no_spare:
        rows.append(Text(NO_SPARE, style="yellow"))
    if went := gone(s):
        rows.append(Text(went, style="dim"))
    if s.contributions:
        rows.append(Text(work_done(s), style="dim"))
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


class Fitting:
    """The first of these tables that fits into the terminal, else the last; and which columns that leaves out."""

    def __init__(self, tables: Sequence[Table], left_out: Sequence[Sequence[str]]):
        self._tables, self._left_out = tables, left_out

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.update(max_width=10_000)
        widths = [Measurement.get(console, room, table).maximum for table in self._tables]
        chosen = next((i for i, width in enumerate(widths) if width <= options.max_width), len(widths) - 1)
        yield self._tables[chosen]
        if left_out := self._left_out[chosen]:
            yield Text(f"not shown below {widths[0]} columns: {', '.join(left_out)}", style="dim")


@dataclass(frozen=True)
class Column:
    name: str
    cells: list[RenderableType]
    right: bool = False


def _fitting(columns: Sequence[Column], dispensable: Sequence[str]) -> Fitting:
    """`dispensable`: columns that may go where there is too little room, the first one first."""

    def without(names: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        kept = [column for column in columns if column.name not in names]
        for column in kept:
            table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
        for row in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*row)
        return table

    there = [column.name for column in columns]
    less = [dispensable[:n] for n in range(len(dispensable) + 1)]
    return Fitting([without(names) for names in less], [[name for name in there if name in names] for names in less])


def stage_table(s: pb.RunStatus) -> Fitting:
    def cells(of: Callable[[pb.StageStatus], RenderableType]) -> list[RenderableType]:
        return [of(stage) for stage in s.stages]

    def figure(name: str, of: Callable[[pb.StageStatus], float], words: Callable[[float], str]) -> Column:
        return Column(name, cells(lambda stage: words(of(stage)) if of(stage) else "–"), right=True)

    columns = [
        Column("stage", cells(lambda t: str(t.stage))),
        Column("layers", cells(_layers)),
        # Peers choose their names: no markup of theirs.
        Column("peer", cells(lambda t: Text(", ".join(holder.name or holder.peer for holder in t.holders)))),
        Column("state", cells(stage_state)),
        *(Column(what, cells(partial(_share, what=what)), right=True) for what in ("compute", "wait", "wire")),
        figure("B/token →", lambda t: t.forward_bytes_per_token, lambda b: f"{b:.1f}"),
        figure("B/token ←", lambda t: t.backward_bytes_per_token, lambda b: f"{b:.1f}"),
        figure("vs bf16", lambda t: t.ratio_bf16, lambda ratio: f"{ratio:.1f} ×"),
        Column("link to the next", cells(lambda t: Text(_link(t) if t.stage + 1 < len(s.stages) else ""))),
        # On a CPU nobody can tell what the stage takes: the process has torch in it, which no forecast counts.
        figure("process" if any(t.process_memory for t in s.stages) else "memory", lambda t: t.peak_memory, size),
        figure("stage needs", lambda t: t.forecast_memory, size),
    ]
    if any(t.celsius for t in s.stages):
        columns.append(Column("card", cells(_warmth), right=True))
    return _fitting(
        columns,
        ("stage needs", "card", "process", "memory", "vs bf16", "B/token ←", "B/token →", "link to the next", "layers"),
    )


def _warmth(t: pb.StageStatus) -> str:
    return f"{t.celsius:.0f} °C {t.watts:.0f} W" if t.celsius else "–"


def _layers(t: pb.StageStatus) -> str:
    return f"{t.first_layer}" + (f"–{t.end_layer - 1}" if t.end_layer - t.first_layer > 1 else "")


def stage_state(t: pb.StageStatus) -> str:
    """A stage without a connected holder: how that went."""
    how = next((holder.presence for holder in t.holders if holder.presence > pb.HERE), None)
    return _words(pb.StageStatus.State, t.state) if how is None else _words(pb.Presence, how)


def _share(t: pb.StageStatus, what: str) -> str:
    share: float = getattr(t, f"{what}_share")
    return f"{share:.0%}" if t.compute_share or t.wait_share or t.wire_share else "–"


def _link(t: pb.StageStatus) -> str:
    """The path of the link to the next stage: "LAN · 0.4 ms"."""
    names = {"": "–", "lan": "LAN", "public": "direct", "door": "relayed by the coordinator"}
    path = names.get(t.path, t.path.replace("relay ", "relayed by "))
    return f"{path} · {duration(t.round_trip_s)}" if t.round_trip_s and t.path else path


def why_not_direct(s: pb.RunStatus) -> list[str]:
    """Why links are relayed, or punched, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for t in s.stages:
        if t.path_why:
            how = "relayed" if is_relayed(t.path) else t.path
            found.setdefault((how, t.path_why), []).append(f"{t.stage}–{t.stage + 1}")
    return [f"{how} between stages {', '.join(links)}: {why}" for (how, why), links in found.items()]


def peer_table(s: pb.RunStatus) -> RenderableType:
    went = [Text(gone(s), style="dim")] if s.gone else []
    if not s.peers:
        return Group(Text("no peer is connected"), *went)

    def cells(of: Callable[[pb.PeerStatus], RenderableType]) -> list[RenderableType]:
        return [of(peer) for peer in s.peers]

    columns = [
        Column("peer", cells(lambda p: p.peer)),
        Column("name", cells(lambda p: Text(p.name))),
        *([Column("token for", cells(lambda p: Text(p.person)))] if any(p.person for p in s.peers) else []),
        Column("state", cells(_state)),
        Column("device", cells(lambda p: Text(p.device))),
        Column("free memory", cells(lambda p: size(p.memory))),
        Column("speed", cells(lambda p: rate(p.flops, "FLOP/s"))),
        Column("address", cells(lambda p: p.address)),
        Column("dialled", cells(lambda p: "directly" if p.reachable else "by relay")),
        Column("joined", cells(lambda p: f"{duration(p.joined_s)} ago")),
    ]
    return Group(_fitting(columns, ("peer", "joined", "speed", "free memory", "dialled", "token for")), *went)


def spares(s: pb.RunStatus) -> str:
    """Who waits to take a stage over; empty where nobody does."""
    names = sorted(p.name or p.peer for p in s.peers if p.state == pb.PeerStatus.SPARE)
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{plural(len(names), 'spare')}: {shown}" if names else ""


def resting(s: pb.RunStatus) -> str:
    """Who wants no stage for now; empty where nobody does."""
    each = [f"{p.name or p.peer} {until_when(p.rests_until)}" for p in s.peers if p.state == pb.PeerStatus.RESTING]
    more = f" and {len(each) - 4} more" if len(each) > 4 else ""
    return f"resting: {', '.join(each[:4])}{more}" if each else ""


def gone(s: pb.RunStatus) -> str:
    """Peers that were here lately; empty where there are none."""
    each = [f"{g.name or g.peer} ({_words(pb.Presence, g.how)} {duration(round(g.gone_s))} ago)" for g in s.gone[:4]]
    more = f" and {len(s.gone) - 4} more" if len(s.gone) > 4 else ""
    return f"gone: {', '.join(each)}{more}" if each else ""


def work_done(s: pb.RunStatus) -> str:
    """Who did how much: the first few names."""
    shown = [
        f"{c.name or 'others'} {plural(c.steps, 'step')} ({duration(c.seconds)}, {size(c.sent_bytes)} sent)"
        for c in s.contributions[:MOST_SHOWN]
    ]
    more = len(s.contributions) - len(shown)
    return f"done by {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"


def _state(p: pb.PeerStatus) -> str:
    match p.state:
        case pb.PeerStatus.HOLDING:
            return f"holds stage {p.stage}"
        case pb.PeerStatus.LEAVING:
            return f"leaving stage {p.stage}"
        case pb.PeerStatus.UNPLACED:
            return "waits for others"
        case pb.PeerStatus.RESTING:
            return f"resting {until_when(p.rests_until)}"
        case _:
            return "spare"
