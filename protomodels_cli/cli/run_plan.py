"""The work of `pmtrain plan`."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from protomodels_cli.cli.checks import speed_of
from protomodels_cli.cli.known_cards import card_named
from protomodels_cli.cli.line import as_option, line_of
from protomodels_cli.cli.outlook import Outlook, day_in_words, first_line, line_in_words, outlook, reading_in_words
from protomodels_cli.cli.output import Format, print_json
from protomodels_cli.codecs import parse_codec
from protomodels_cli.cost.activations import Computation
from protomodels_cli.cost.audits import CHANCE_STEPS, Auditing, forecast_auditing
from protomodels_cli.cost.forecast import Bottleneck, Choice, Forecast, choices, forecast, recommended
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.recompute import pick
from protomodels_cli.cost.saving import Saving, forecast_saving
from protomodels_cli.cost.sizes import ModelSize, dense_model
from protomodels_cli.cost.units import anchor_bytes
from protomodels_cli.cost.ways import SOURCE, WAYS, expected_loss
from protomodels_cli.errors import OptionError
from protomodels_cli.forms import form_named
from protomodels_cli.quantities import count as count_of
from protomodels_cli.quantities import duration, figures, plural, rate, size
from protomodels_cli.spec.cut import anchored_layers, atom, cut_evenly, layers_per_stage, spans
from protomodels_cli.spec.errors import SpecError
from protomodels_cli.spec.load import load_spec, spec_from, with_absolute_paths
from protomodels_cli.spec.schema import LinkSpec, RunSpec

AGAIN = {"none": "nothing", "block": "blocks", "stage": "stage"}  # is computed again in the backward pass


def run(
    spec_file: Path,
    link_text: str,
    peers: int | None,
    gib: float | None,
    speed: str | None,
    card_name: str | None,
    any_recipe: bool,
    device: str,
    output: Format,
) -> None:
    link, card = line_of(link_text), None if card_name is None else card_named(card_name)
    gib = gib if card is None or gib is not None else card.memory
    memory = None if gib is None else int(gib * 2**30)
    whole = with_absolute_paths(load_spec(spec_file), spec_file.parent)
    spec = cut_for(whole, peers, memory)
    said = speed_of(speed) or (card and card.speed)
    flops, computation = (said, None) if said else _measured(spec, device)
    windows = _windows(spec)
    predicted = forecast(spec, link, flops, windows=windows, memory=memory, computation=computation)
    found = choices(candidates(spec), link, flops, memory, computation)
    best = recommended(found, any_recipe)
    busy = predicted.wire_seconds / predicted.step_seconds
    saving = forecast_saving(spec, link.bits_per_second, predicted.step_seconds, windows, busy)
    stages, largest = predicted.stages, max(stage.memory for stage in predicted.stages)
    auditing = forecast_auditing(
        spec,
        link.bits_per_second,
        predicted.step_seconds,
        saving.interval_seconds,
        saving.part_bytes,
        [stage.compute for stage in stages],
        largest,
    )
    fits = None if memory is None else largest <= memory
    comes_to = outlook(spec, Path(), link, flops, predicted, saving, fits, card.watts if card else None)
    if output == "json":
        rows = [{**crossing(c.spec), "keeps_up": c.keeps_up, "fits": c.fits, **asdict(c.forecast)} for c in found]
        result = {
            "link": as_option(link),
            "flops": flops,
            "outlook": asdict(comes_to),
            "size": asdict(ModelSize.of(spec)),
            "dense_size": asdict(ModelSize.of(dense_model(spec))),
            "anchor_bytes": anchor_bytes(spec) if anchored_layers(spec) else 0,
            "forecast": asdict(predicted),
            "choices": rows,
            "recommended": None if best is None else crossing(best.spec),
            "snapshots": {name: _finite(value) for name, value in asdict(saving).items()},
            "audit": None if auditing is None else asdict(auditing),
        }
        print_json(result)
    else:
        where = "measured here" if said is None else "--speed" if speed else "--card"
        told = _Told(spec, link, flops, where, memory, predicted, found, best, saving, auditing, comes_to)
        _show(told, line_in_words(link_text), card is not None)
    if memory is not None and not fits:
        raise _does_not_fit(whole, spec, best, largest, memory, computation)
    _check_upload(spec, saving, predicted.step_seconds)


@dataclass(frozen=True)
class _Told:
    spec: RunSpec
    link: LinkSpec
    flops: float
    where: str  # the speed comes from
    memory: int | None
    forecast: Forecast
    found: list[Choice]
    best: Choice | None
    saving: Saving
    auditing: Auditing | None
    outlook: Outlook


def _does_not_fit(
    whole: RunSpec, spec: RunSpec, best: Choice | None, largest: int, memory: int, computation: Computation | None
) -> OptionError:
    """With the nearest that does: as it stands here it fits."""
    cut, sizes = spans(layers_per_stage(spec)), StageMemory(spec)
    need = max(sizes.total(span.start, span.stop, len(cut) - 1 - i, computation) for i, span in enumerate(cut))
    tenths = next(n for n in count(math.ceil(10 * need / 2**30)) if _fit(spec, int(n / 10 * 2**30), computation))
    ways = [f"--memory {tenths / 10:g}gib"]
    for peers in range(len(cut) + 1, spec.model.layers // atom(spec) + 1):
        with contextlib.suppress(SpecError):  # it cannot be cut into so many
            if _fit(cut_for(whole, peers, memory), memory, computation):
                ways.insert(0, f"--peers {peers} with this memory")
                break
    if best is not None:
        ways.append(f"{_named_way(best.spec)} in the spec")
    return OptionError(
        f"{whole.name} does not fit: its largest stage takes {size(largest)}, and a peer has {size(memory)}",
        ways[0] if len(ways) == 1 else f"one of {', '.join(ways)}",
        "does_not_fit",
    )


def _fit(spec: RunSpec, memory: int, computation: Computation | None) -> bool:
    cut, sizes = spans(layers_per_stage(spec)), StageMemory(spec)
    found = (pick(sizes, span.start, span.stop, len(cut) - 1 - i, computation, memory) for i, span in enumerate(cut))
    return all(stage.bytes <= memory for stage in found)


def _named_way(spec: RunSpec) -> str:
    k = f", k = {spec.subspace.k}" if spec.form.has_basis else ""
    return f"{spec.subspace.form}{k}, {spec.wire.forward}"


def _finite(value: Any) -> Any:
    """JSON has no infinity; None: never."""
    return None if isinstance(value, float) and math.isinf(value) else value


def candidates(spec: RunSpec) -> list[RunSpec]:
    """The same run with other ways to cross the boundaries, by what they cost in loss: the first ones least."""
    ways = list(WAYS)
    if spec.model.init is not None:
        ways = [way for way in ways if form_named(way.form).init_problem() is None]
    found = []
    for form, k, codec, anchor in dict.fromkeys((w.form, w.k(spec.model.width), w.codec, w.anchor) for w in ways):
        data: dict[str, Any] = spec.model_dump(mode="json")
        rank = None if anchor == "fixed" else spec.subspace.anchor_rank
        data["subspace"] |= {"form": form, "k": k, "anchor": anchor, "anchor_rank": rank, "update": {}}
        if (form, anchor) != (spec.subspace.form, spec.subspace.anchor):
            data["subspace"] |= {"anchor_tokens": None, "early_loss": None}  # as is usual with each
        if form != spec.subspace.form:
            data["subspace"]["unconstrained_layers"] = None  # the form's own
        if not spec.has_segments:
            data["model"]["segments"] = None  # the stages
        if spec.model.dense_hidden is not None:
            data["model"]["hidden"] = f"auto:{spec.model.dense_hidden}"
        data["wire"] |= {"forward": codec, "backward": codec}
        fits = (o for o in (spec.optimizer.name, "adamw") if form_named(form).optimizer_problem(o) is None)
        data["optimizer"]["name"] = next(fits)
        found.append(spec_from(data))
    return found


def crossing(spec: RunSpec) -> dict[str, Any]:
    sub = spec.subspace
    return {
        "form": sub.form,
        "k": sub.k,
        "anchor": sub.anchor,
        "codec": spec.wire.forward,
        "expected_loss": expected_loss(spec),
    }


def _check_upload(spec: RunSpec, saving: Saving, step: float) -> None:
    """Raises OptionError where the spec asks for snapshots faster than a peer can upload them."""
    if saving.upload_seconds <= saving.interval_seconds:
        return
    by_time = saving.by == "every"
    field, value = ("every", spec.snapshots.every) if by_time else ("interval", spec.snapshots.interval)
    least = f"{math.ceil(saving.upload_seconds / 60)}min" if by_time else math.ceil(saving.upload_seconds / step)
    raise OptionError(
        f"snapshots.{field} = {value}: a snapshot is due every "
        f"{duration(saving.interval_seconds)}, and uploading one takes {duration(saving.upload_seconds)}",
        f"set snapshots.{field} to {least} or more"
        + (", or raise snapshots.max_bandwidth" if spec.snapshots.max_bandwidth else ""),
        "upload_too_slow",
    )


def _saving_in_words(spec: RunSpec, saving: Saving) -> str:
    due = "once, at the end"
    if math.isfinite(saving.interval_seconds):
        due = f"every {duration(saving.interval_seconds)}"
    keep = spec.snapshots.keep
    return (
        f"A snapshot is due {due}; its largest part has {size(saving.part_bytes)} and takes "
        f"{duration(saving.upload_seconds)} to upload while training goes on.\n"
        f"On the coordinator's disk a snapshot takes {size(saving.snapshot_bytes)}; {keep} that are kept and one that "
        f"arrives (snapshots.keep = {keep}) take {size(saving.disk_bytes)}.\n"
        f"A crash costs {duration(saving.redo_seconds + saving.restore_seconds)} on average: "
        f"{duration(saving.redo_seconds)} to redo, {duration(saving.restore_seconds)} to fetch a part and build its "
        f"stage.\n"
    )


def _auditing_in_words(spec: RunSpec, audits: Auditing | None) -> str:
    if audits is None:
        return ""
    if not audits.audits_a_day:
        return f"audit = {spec.audit:g}: nobody is audited, since the run has no snapshot before its end.\n"
    return (
        f"audit = {spec.audit:g}: {figures(audits.audits_a_day)} audits a day, {audits.stage_share:.2%} of each "
        f"stage's steps; who lies in every message is found within {CHANCE_STEPS} steps with probability "
        f"{audits.found_within:.4f}. They need a spare with {size(audits.spare_memory)} of memory: without one nobody "
        f"is audited.\n"
        f"For them a peer keeps {size(audits.recorded_bytes)} of messages on its disk. An audit uploads "
        f"{size(audits.shown_bytes)} ({audits.uplink_share:.2%} of a peer's line on average); the spare fetches "
        f"{size(audits.fetched_bytes)} and takes {duration(audits.spare_seconds)}: {audits.spare_share:.0%} of its time"
        f"{', so that some audits are left out' if audits.spare_share > 1 else ''}.\n"
    )


def cut_for(spec: RunSpec, peers: int | None = None, memory: int | None = None) -> RunSpec:
    """The spec with a cut: the spec's own, or one for this many peers with so much memory each."""
    if peers is None and spec.stages != "auto":
        return spec
    number = peers or spec.min_peers
    stages = _placed(spec, number, memory) if spec.stages == "auto" else cut_evenly(spec, number)
    return spec_from(spec.model_dump(mode="json") | {"stages": stages})


def _measured(spec: RunSpec, name: str) -> tuple[float, Computation]:
    """This machine's speed, and how it computes."""
    from protomodels_cli.worker.device import choose, computation_of, measure_flops

    device = choose(name)
    return measure_flops(spec, device, seconds=1.0), computation_of(spec, device)


def _placed(spec: RunSpec, peers: int, memory: int | None) -> int | list[int]:
    """The cut that the coordinator would choose for equal peers."""
    from protomodels_cli.coordinator.placement import Offer, Placement, place

    found = place(spec, [Offer(f"peer-{i}", 1 << 62 if memory is None else memory, 1e9) for i in range(peers)])
    return list(found.layers) if isinstance(found, Placement) else cut_evenly(spec, peers)


def _windows(spec: RunSpec) -> int | None:
    """How many samples the data have, if a codec keeps a memory of each; None otherwise."""
    if not parse_codec(spec.wire.forward).codec.remembers_samples:
        return None
    from protomodels_cli.data.batches import Batches
    from protomodels_cli.data.prepare import prepare

    return Batches(prepare(spec).train, spec).windows


def _sizes(spec: RunSpec) -> str:
    """The model's, beside those of the dense model of equal shape."""
    own, dense = ModelSize.of(spec), ModelSize.of(dense_model(spec))

    def one(m: ModelSize) -> str:
        anchors = f", anchors {count_of(m.anchors)}" if m.anchors else ""
        anchors += f", early heads {count_of(m.early)} (in training alone)" if m.early else ""
        return (
            f"{count_of(m.blocks)} parameters in blocks (hidden {m.hidden}), {rate(m.block_flops, 'FLOP')} a token; "
            f"embedding {count_of(m.embedding)}, "
            f"head {count_of(m.head)} ({rate(m.head_flops, 'FLOP')} a token){anchors}"
        )

    text = f"The model: {one(own)}.\n"
    if own != dense:
        text += f"Dense, of equal shape: {one(dense)}.\n"
    if anchors := len(anchored_layers(spec)):
        each = anchor_bytes(spec)
        entry = figures(each / (spec.vocab_size * spec.anchor_width))
        text += f"{plural(anchors, 'trained anchor')}: {size(each)} each, {entry} bytes an entry with its moments.\n"
    return text


def _named(b: Bottleneck) -> str:
    match b.kind:
        case "compute":
            return f"computing, above all in stage {b.stage}"
        case "bandwidth":
            return f"bandwidth, above all of stage {b.stage}'s connection"
        case "latency":
            return "latency of the links"
        case "in_flight":
            return "batch.in_flight (with more microbatches in flight, stages would wait less)"
        case "coordinator":
            return "the round trip to the coordinator, once per step"


def _show(told: _Told, line: str, named: bool) -> None:
    spec, link, f, best = told.spec, told.link, told.forecast, told.best
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    form = f"{spec.subspace.form}, k = {spec.subspace.k}" if spec.form.has_basis else spec.subspace.form
    limited = told.memory is not None
    say(
        f"[bold]{first_line(told.outlook, f)}[/]\n{line}{_fitting(told)}"
        f"{day_in_words(told.outlook, named)}.\n"
        f"{reading_in_words(told.outlook, spec)}.\n\n"
        f"[bold]{spec.name}[/]: {form}, {spec.wire.forward} forward and {spec.wire.backward} backward, "
        f"{plural(len(f.stages), 'peer')} of {rate(told.flops, 'FLOP/s')} ({told.where}), "
        f"each with a connection of {link.in_words}\n"
    )
    chosen = ("in flight", "again") if limited else ()
    table = Table("stage", "layers", "memory", *chosen, "computes a step for", "line busy", box=None, pad_edge=False)
    for i, stage in enumerate(f.stages):
        on_host = f" + {size(stage.host_memory)} of host memory" if stage.host_memory else ""
        line = duration(stage.line) if stage.line else "–"
        memory = f"{size(stage.memory)}{on_host}"
        chosen = (str(stage.in_flight), AGAIN[stage.recompute]) if limited else ()
        table.add_row(str(i), str(stage.layers), memory, *chosen, duration(stage.compute), line)
    console.print(table)
    say(f"\n{_sizes(spec)}")
    forward, backward = (size(int(f.bytes_per_step[leg])) for leg in ("forward", "backward"))
    crossing = f"Every step sends {forward} forward and {backward} backward over each boundary, headers included.\n"
    say(
        f"{crossing if len(f.stages) > 1 else ''}"
        f"A step takes [bold]{duration(f.step_seconds)}[/] ({rate(f.tokens_per_s, 'tok/s')}); "
        f"with an ideal link it would take {duration(f.compute_seconds)}.\n"
        f"The busiest connection carries data for {duration(f.wire_seconds)}; "
        f"the busiest stage idles {100 * f.bubble:.0f} % of the time (bubble).\n"
        f"Bottleneck: {_named(f.bottleneck)}.\n"
        f"{_saving_in_words(spec, told.saving)}{_auditing_in_words(spec, told.auditing)}"
    )
    columns = [Column(name, no_wrap=True) for name in ("form", "k", "anchor", "codec", "loss", "step", "tok/s", "")]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for c in told.found:
        mark = "too large" if not c.fits else "← best" if c is best else "keeps up" if c.keeps_up else ""
        k, anchor = (str(c.spec.subspace.k), c.spec.subspace.anchor) if c.spec.form.has_basis else ("–", "–")
        step, speed = duration(c.forecast.step_seconds), count_of(c.forecast.tokens_per_s)
        cost = "–" if c.loss is None else f"{c.loss:+.1%}"
        table.add_row(c.spec.subspace.form, k, anchor, c.spec.wire.forward, cost, step, speed, mark)
    console.print(table)
    say(f"\nLoss: above dense's at equal tokens, where it was measured ({SOURCE}).")
    if best is not None:
        say(
            "Best: at dense's loss soonest, where 1 % of loss costs 10 % more steps. What nobody has measured is not\n"
            "recommended, unless --any-recipe asks for it."
        )


def _fitting(told: _Told) -> str:
    """Whether any way of crossing fits, where the peers' memory was said; otherwise how much it must be."""
    largest = max(stage.memory for stage in told.forecast.stages)
    if told.memory is None:
        return f"A peer needs up to {size(largest)} of memory.\n"
    takes = f"The largest stage takes {size(largest)} of {size(told.memory)}"
    fitting = sum(choice.fits for choice in told.found)
    if told.outlook.fits:
        return f"{takes}.\n"
    others = f"{fitting} of {len(told.found)} fit" if fitting else "none fits"
    return f"{takes}; of the other ways to cross the boundaries, below, {others}.\n"
