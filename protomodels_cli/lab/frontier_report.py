"""What the frontier experiment's rows say: a table, the Pareto front, the codec taken off, time to a loss."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from protomodels_cli.lab.results import Result
from protomodels_cli.spec.units import bits_per_second

LINKS = ("5mbit", "20mbit", "80mbit", "200mbit")
MODEL = (
    "seconds = steps to the target × seconds a step; seconds a step = the larger of compute and line. Compute: the "
    "median step measured here in one process, codecs included, while other runs went beside it, divided by the "
    "stages (equal peers like this machine, "
    "a full pipeline, no bubble). Line: bytes a token × tokens a step over the bandwidth of a middle stage's uplink, "
    "which carries activations to one neighbour and gradients to the other. Latency, framing and the two ends' lighter "
    "lines are left out. Steps: between two evaluations by straight line, on the better of codec on and codec off; "
    "bytes of AQ-SGD are its mean over the run, the whole first epoch included. All runs have the learning rate "
    "schedule of the full length"
)
GROUP = ("form", "k", "codec", "optimizer", "t_fixed_scale")
Seconds = Callable[[Result], float]


def name_of(row: Result) -> str:
    width = "" if row["k"] is None else f" k={row['k']}"
    return f"{row['form']}{width} {row['codec']}"


def grouped(rows: Sequence[Result]) -> list[Result]:
    """Rows that differ by seed alone as one, by bytes: means, the spread from lowest to highest, the Pareto mark.

    A group in which a seed diverged has no loss. `best` is the lower of the losses with the codec on and off."""
    seeds: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        seeds.setdefault(tuple(row[key] for key in GROUP), []).append(row)
    groups = []
    for key, members in seeds.items():
        group = dict(zip(GROUP, key, strict=True)) | {
            "name": name_of(members[0]),
            "lr": members[0]["lr"],
            "members": members,
        }
        for field in ("bytes_per_token", "ratio_bf16", "ratio_fp32", "loss", "loss_codec_off", "gap_to_dense"):
            group[field] = _mean([m[field] for m in members])
        found = [x for x in (group["loss"], group["loss_codec_off"]) if x is not None]
        group["best"] = min(found, default=None)
        losses = [m["loss"] for m in members if m["loss"] is not None]
        group["spread"] = max(losses) - min(losses) if losses else None
        groups.append(group)
    names = [(g["name"], g["optimizer"]) for g in groups]
    for group, name in zip(groups, names, strict=True):
        if names.count(name) > 1:  # they differ by T_fixed alone
            group["name"] += f" ±{group['t_fixed_scale']:g}"
    groups.sort(key=lambda g: (g["bytes_per_token"], float("inf") if g["best"] is None else g["best"]))
    lowest = float("inf")
    for group in groups:  # from few bytes to many: on the front is what nothing cheaper beats
        group["pareto"] = group["best"] is not None and group["best"] < lowest
        lowest = min(lowest, group["best"] if group["best"] is not None else lowest)
    return groups


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return mean(there) if len(there) == len(values) else None


# Time to a loss


def link_seconds(link: str, tokens_per_step: int) -> Seconds:
    """Seconds a step of a row on this link, as MODEL says."""
    bandwidth = bits_per_second(link)

    def seconds(row: Result) -> float:
        line = 8 * float(row["bytes_per_token"]) * tokens_per_step / bandwidth
        return max(float(row["compute_seconds"]), line)

    return seconds


def steps_to(evals: Sequence[Result], target: float) -> float | None:
    """The first step at which the held-out loss is at the target, between two evaluations by straight line."""
    points = [(e["step"], _lower(e)) for e in evals]
    known = [(step, loss) for step, loss in points if loss is not None]
    if known and known[0][1] <= target:
        return float(known[0][0])
    for (step, loss), (next_step, next_loss) in pairwise(known):
        if next_loss <= target:
            return step + (next_step - step) * (loss - target) / (loss - next_loss)
    return None


def _lower(e: Result) -> float | None:
    return min((x for x in (e["loss"], e["loss_codec_off"]) if x is not None), default=None)


def time_to_loss(rows: Sequence[Result], step_seconds: Seconds, target: float) -> list[Result]:
    """For every group of seeds the mean steps and seconds to `target`; None unless every seed reached it."""
    found = []
    for group in grouped(rows):
        steps = [steps_to(row["evals"], target) for row in group["members"]]
        each = [step_seconds(row) for row in group["members"]]
        seconds = [None if s is None else s * t for s, t in zip(steps, each, strict=True)]
        found.append(
            {key: group[key] for key in (*GROUP, "name")}
            | {"steps": _mean(steps), "step_seconds": mean(each), "seconds": _mean(seconds)}
            | {"seeds": len(steps), "reached": sum(s is not None for s in steps)}
        )
    return found


# In words


def report(result: Result) -> str:
    scale, base = result["scale"], result["baseline"]
    lines = [
        f"{scale['layers']} layers = {scale['layers']} stages, d={scale['width']}, {scale['steps']} steps × "
        f"{scale['batch'] * scale['context']} tokens: {result['epochs']:.1f} epochs of {result['train_tokens']}, "
        f"{result['held_out_tokens']} held out; {scale['seeds']} seed(s)",
        f"baseline, the best of {len(result['dense_sweep'])} dense points: {base['optimizer']}, lr {base['lr']:g}, "
        f"embedding std {base['embedding_std']:g}, held-out loss {base['loss']:.4f}"
        + (" (its loss was lower before the end: it overfits)" if overfits(result) else ""),
    ]
    for best in (
        row for row in result["dense_sweep"] + result["subspace_sweep"] if row["best"] and not row["baseline"]
    ):
        lines.append("tuned: " + _tuned(best))
    lines += ["", *_table(result), "", *inference(result), "", *_times(result)]
    return "\n".join(lines + [f"left out: {codec}: {why}" for codec, why in result["left_out"].items()])


def overfits(result: Result) -> bool:
    """Does tuned dense get worse before the end, by more than noise?"""
    rows = [r for r in result["rows"] if r["gap_to_dense"] == 0]
    return any(min(e["loss"] for e in r["evals"]) < 0.995 * r["loss"] for r in rows)


def _tuned(row: Result) -> str:
    width = "" if row["k"] is None else f" k={row['k']}"
    scale = f"embedding std {row['embedding_std']:g}" if row["k"] is None else f"T_fixed scale {row['t_fixed_scale']:g}"
    loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
    end = "" if row["settled"] else " (still getting better when tuning stopped)"
    return f"{row['form']}{width} {row['optimizer']}: lr {row['lr']:g}, {scale}, {loss} on seed 0{end}"


def _table(result: Result) -> list[str]:
    lines = [
        f"  {'form and codec':31} {'optimizer':9} {'T_fixed':>7} {'lr':>7} {'B/token':>8} {'×bf16':>6} {'×fp32':>6} "
        f"{'loss':>7} {'spread':>6} {'codec off':>9} {'gap':>7}"
    ]
    for g in grouped(result["rows"]):
        scale = "" if g["t_fixed_scale"] is None else f"{g['t_fixed_scale']:g}"
        lines.append(
            f"{'*' if g['pareto'] else ' '} {g['name']:31} {g['optimizer']:9} {scale:>7} {g['lr']:7.2g} "
            f"{g['bytes_per_token']:8.1f} {g['ratio_bf16']:6.1f} {g['ratio_fp32']:6.1f} {_number(g['loss'], 7, 4)} "
            f"{_number(g['spread'], 6, 3)} {_number(g['loss_codec_off'], 9, 4)} {_percent(g['gap_to_dense'])}"
        )
    lines.append(
        "* nothing with fewer bytes has a lower loss (the better of codec on and off). Bytes: both legs over one "
        "boundary, token ids included. Ratios: against dense numbers both ways."
    )
    return lines


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _percent(value: float | None) -> str:
    return f"{'diverged':>8}" if value is None else f"{value:+8.1%}"


def inference(result: Result) -> list[str]:
    """Does a model that was trained with TopK need TopK at inference, and does error feedback change that?"""
    groups = {g["name"]: g for g in grouped(result["rows"]) if g["k"] is None and g["optimizer"] == "muon"}
    lines = ["without the codec at inference (change of the loss when the codec is off; evaluation has no memory):"]
    cost = {}
    for name in ("topk:0.1", "topk:0.3", "topk:0.1+ef", "topk:0.1+ef21", "int4", "int4+ef", "int4+ef21"):
        group = groups.get(f"dense {name}")
        if group is not None and group["loss"] is not None and group["loss_codec_off"] is not None:
            cost[name] = group["loss_codec_off"] / group["loss"] - 1
            lines.append(f"  {name:14} {group['loss']:8.4f} on {group['loss_codec_off']:8.4f} off {cost[name]:+8.1%}")
    if "topk:0.1" not in cost:
        return [*lines, "  TopK is needed for a verdict"]
    plain = groups["dense topk:0.1"]
    gain = plain["loss_codec_off"] - plain["loss"]
    verdicts = [f"a model trained with TopK needs TopK at inference: {_verdict(gain, plain['spread'])}"]
    for feedback in ("ef", "ef21"):
        # On, its loss is not that of the trained model: the memory is missing. What plain TopK reaches is the measure.
        if (name := f"topk:0.1+{feedback}") in cost:
            group = groups[f"dense {name}"]
            gain = plain["loss"] - group["loss_codec_off"]
            told = _verdict(gain, max(plain["spread"], group["spread"]))
            verdicts.append(f"a model trained with TopK and {feedback.upper()} needs no codec at inference: {told}")
    return [*lines, *(f"  {verdict} here" for verdict in verdicts)]


def _verdict(gain: float, spread: float) -> str:
    """Seeds differ by `spread`: less than that says nothing."""
    return "not decided" if abs(gain) < max(spread, 1e-9) else "confirmed" if gain > 0 else "refuted"


def shown_target(result: Result) -> float:
    """The hardest target that a subspace row reaches on every seed; the easiest if none does."""
    rows = result["time_to_loss"]["rows"]
    above = sorted({row["above_dense"] for row in rows})
    reached = {row["above_dense"] for row in rows if row["k"] is not None and row["seconds"] is not None}
    return min(reached, default=above[-1])


def _times(result: Result) -> list[str]:
    links, rows = result["time_to_loss"]["links"], result["time_to_loss"]["rows"]
    lines = ["time to a loss, in seconds by the model below; – not reached on every seed:"]
    for above in sorted({row["above_dense"] for row in rows}):
        here = [row for row in rows if row["above_dense"] == above]
        lines.append(
            f"  to {here[0]['target']:.4f}, tuned dense {above:+.0%}".ljust(44)
            + "".join(f"{link:>10}" for link in links)
        )
        lines += ["    " + line for line in _time_lines(here, links)]
    return lines + textwrap.wrap(result["time_to_loss"]["model"] + ".", 118)


def _time_lines(rows: Sequence[Result], links: Sequence[str]) -> list[str]:
    lines = []
    for key in contenders(rows, links):
        mine = {row["link"]: row for row in rows if group_key(row) == key}
        first = mine[links[0]]
        seconds = "".join(_number(mine[link]["seconds"], 10, 2) for link in links)
        lines.append(f"{first['name'] + ' ' + first['optimizer']:40}{seconds}")
    return lines


def group_key(row: Result) -> tuple[Any, ...]:
    return tuple(row[key] for key in GROUP)


def contenders(rows: Sequence[Result], links: Sequence[str]) -> list[tuple[Any, ...]]:
    """Dense as it is and in bf16, and the two fastest dense and subspace rows on each link; slowest first."""
    plain = [r for r in rows if r["name"] in ("dense fp32", "dense bf16") and r["optimizer"] == "muon"]
    keys = [group_key(r) for r in plain]
    for link in links:
        for subspace in (False, True):
            there = [
                r for r in rows if r["link"] == link and r["seconds"] is not None and (r["k"] is not None) == subspace
            ]
            keys += [group_key(r) for r in sorted(there, key=lambda r: r["seconds"])[:2]]
    on_first = {group_key(r): r["seconds"] for r in rows if r["link"] == links[0]}
    return sorted(dict.fromkeys(keys), key=lambda key: -(on_first[key] or float("inf")))
