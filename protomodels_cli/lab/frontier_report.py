"""What the frontier experiment's rows say: a table, the Pareto front, time to a loss in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import mean

from protomodels_cli.lab.results import Result
from protomodels_cli.quantities import count, plural

BASELINE = "dense fp32"  # what everything is held against


def grouped(rows: Sequence[Result]) -> list[Result]:
    """Rows that differ by seed alone as one, by bytes: means, spreads from lowest to highest, the Pareto mark.

    A group in which a seed diverged has no loss. Its `paired_loss` can be compared with groups of other seeds: dense's
    mean loss, with the group's own gap to dense."""
    dense = dense_losses(rows)
    seeds: dict[str, list[Result]] = {}
    for row in rows:
        seeds.setdefault(row["name"], []).append(row)
    groups = []
    for name, members in seeds.items():
        first = members[0]
        group: Result = {key: first[key] for key in ("form", "anchor", "k", "codec", "parameters", "flops_per_token")}
        group |= {"name": name, "members": members}
        for field in ("bytes_per_token", "ratio_bf16", "ratio_fp32", "loss", "gap_to_dense", "gap_to_anchored"):
            values = [m[field] for m in members]
            there = [v for v in values if v is not None]
            group[field] = mean(there) if len(there) == len(values) else None
            group[f"{field}_spread"] = max(there) - min(there) if there else None
        gap = group["gap_to_dense"]
        group["paired_loss"] = group["loss"] if gap is None or not dense else mean(dense.values()) * (1 + gap)
        groups.append(group)
    groups.sort(key=lambda g: (g["bytes_per_token"], _or_infinite(g["paired_loss"])))
    lowest = float("inf")
    for group in groups:  # from few bytes to many: on the front is what nothing cheaper beats
        loss = _or_infinite(group["paired_loss"])
        group["pareto"] = loss < lowest
        lowest = min(lowest, loss)
    return groups


def _or_infinite(loss: float | None) -> float:
    return float("inf") if loss is None else loss


def dense_losses(rows: Sequence[Result]) -> dict[int, float]:
    """The last loss of the plain dense model, by seed."""
    return {row["seed"]: row["loss"] for row in rows if row["name"] == BASELINE and row["loss"] is not None}


# In words


def report(result: Result) -> str:
    s = result["scale"]
    lines = [
        f"{s['layers']} layers in {s['segments']} segments, d={s['width']}, V={s['vocabulary']}; {s['steps']} steps × "
        f"{s['batch'] * s['context']} tokens, each token once of {count(result['train_tokens'])}; "
        f"{plural(s['seeds'], 'seed')} for what matters",
        *textwrap.wrap(f"tuned: {result['tuning']}.", 118),
    ]
    for name, family in result["families"].items():
        lines.append(f"  {name:20} {_rates(family['best'])}{' (not finished)' if family['unfinished'] else ''}")
    lines += ["", *_table(result["rows"]), "", *_times(result["time_to_loss"])]
    return "\n".join(lines + [f"missing: {name}: {why}" for name, why in result["missing"].items()])


def _rates(recipe: Result) -> str:
    own = f"anchors {recipe['anchor_lr']:.3g}" if recipe["anchor"] != "fixed" else ""
    if recipe["k"] is not None:
        own += f" T_fixed ±{recipe['t_fixed_scale']:.3g}"
    return (
        f"matrices {recipe['lr']:.3g}, decay {recipe['weight_decay']:.3g}, embedding {recipe['embedding_lr']:.3g} from "
        f"std {recipe['embedding_std']:.3g} {own}".rstrip()
    )


def _table(rows: Sequence[Result]) -> list[str]:
    lines = [
        f"  {'':46} {'B/token':>8} {'×bf16':>6} {'×fp32':>6} {'loss':>7} {'seeds':>5} {'to dense':>15} "
        f"{'to dense+anchors':>16} {'blocks':>7} {'tables':>7} {'FLOP/t':>7}"
    ]
    for g in grouped(rows):
        p = g["parameters"]
        lines.append(
            f"{'*' if g['pareto'] else ' '} {g['name']:46} {g['bytes_per_token']:8.1f} {g['ratio_bf16']:6.1f} "
            f"{g['ratio_fp32']:6.1f} {number(g['loss'], 7, 4)} {len(g['members']):5} {percent(g, 'gap_to_dense'):>15} "
            f"{percent(g, 'gap_to_anchored'):>16} {count(p['blocks']):>7} {count(p['tables']):>7} "
            f"{count(g['flops_per_token']):>7}"
        )
    lines += textwrap.wrap(
        "* nothing with fewer bytes has a lower loss. Bytes: both legs over one boundary, with scales, padding and "
        "token ids, and of a shared anchor its sums and changes. Ratios: against dense numbers both ways. Gaps: mean "
        "over paired seeds ± half of lowest to highest; dense+anchors: the dense model with as many trained anchors. "
        "Blocks, tables: parameters.",
        118,
    )
    return lines


def number(value: float | None, width: int, digits: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def percent(group: Result, field: str) -> str:
    if group[field] is None:
        return "diverged" if group["loss"] is None else "–"
    spread = f" ± {group[f'{field}_spread'] / 2:.2%}" if len(group["members"]) > 1 else ""
    return f"{group[field]:+.2%}{spread}"


def _times(found: Result) -> list[str]:
    links, rows = found["links"], found["rows"]
    if not rows:
        return ["time to a loss: dense is missing"]
    lines = ["time to dense's last loss of the same seed, in seconds by the model below; – not reached on every seed:"]
    for above in sorted({row["above_dense"] for row in rows}):
        here = [row for row in rows if row["above_dense"] == above]
        lines.append(
            f"  to {here[0]['target']:.4f}, dense's last {above:+.0%}".ljust(48)
            + "".join(f"{link:>10}" for link in links)
        )
        for name in contenders(here, links):
            mine = {row["link"]: row for row in here if row["name"] == name}
            lines.append(f"    {name:44}" + "".join(number(mine[link]["seconds"], 10, 2) for link in links))
    return lines + textwrap.wrap(found["model"] + ".", 118)


def contenders(rows: Sequence[Result], links: Sequence[str]) -> list[str]:
    """Dense in fp32, bf16 and int8, and the three fastest others on each link; slowest first."""
    fixed = [row["name"] for row in rows if row["name"].startswith((BASELINE, "dense bf16", "dense int8"))]
    names = list(fixed)
    for link in links:
        there = [r for r in rows if r["link"] == link and r["seconds"] is not None and r["name"] not in fixed]
        names += [r["name"] for r in sorted(there, key=lambda r: r["seconds"])[:3]]
    on_first = {row["name"]: row["seconds"] for row in rows if row["link"] == links[0]}
    return sorted(dict.fromkeys(names), key=lambda name: -(on_first[name] or float("inf")))
