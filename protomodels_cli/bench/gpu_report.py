"""What `bench gpu` found: every case over plain torch, over its own bounds, and over dense messages on the same link.

Pure, from the entries of a results file, however many of them there are yet.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from protomodels_cli.forms import form_named
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.quantities import rate, size

PARTS = ("compute_s", "wait_s", "wire_s")  # of a stage's time, as peers report them

Entry = dict[str, Any]
Ratios = dict[str, Any]


def ratios(result: Entry, peak: float | None) -> dict[str, Ratios]:
    """By name of the case. `peak`: FLOP/s of one card."""
    done = {name: entry for name, entry in result["entries"].items() if "failed" not in entry}
    return {name: _ratios(entry, list(done.values()), peak) for name, entry in done.items()}


def _ratios(entry: Entry, done: list[Entry], peak: float | None) -> Ratios:
    """All are None or empty where what they are held against has not been measured."""

    def same(other: Entry, *fields: str) -> bool:
        return all(other[field] == entry[field] for field in fields)

    speed = _speed(entry)
    found: Ratios = {
        "mfu": None if peak is None else speed / peak,
        "over_torch": {o["way"]: speed / _speed(o) for o in done if o["way"] and same(o, "windows") and o is not entry},
    }
    if entry["link"] == "none":
        return found
    rate = entry["tokens_per_s"]
    free = next(
        (o["tokens_per_s"] for o in done if o["link"] == "none" and same(o, "method", "stages", "windows")), None
    )
    bounds = [bound for bound in (free, entry["wire_bound"]) if bound is not None]
    dense = [o for o in done if same(o, "link", "stages", "windows") and not _has_basis(o) and o is not entry]
    return found | {
        "compute_bound": free,
        "wire_bound": entry["wire_bound"],
        "of_compute_bound": None if free is None else rate / free,
        "of_bound": rate / min(bounds) if bounds else None,
        "over_dense": {o["method"]["codec"]: rate / o["tokens_per_s"] for o in dense},
    }


def _speed(entry: Entry) -> float:
    """Model FLOP/s of a card."""
    return float(entry["model_flops_per_s"] / entry["cards"])


def _has_basis(entry: Entry) -> bool:
    return entry["method"] is not None and form_named(entry["method"]["form"]).has_basis


def in_words(result: Entry, peak: float | None) -> str:
    s, found = result["setting"], ratios(result, peak)
    m = s["model"]
    ways = list(dict.fromkeys(e["way"] for n, e in result["entries"].items() if n in found and e["way"]))
    lines = [
        f"{', '.join(s['hardware'])}, torch {s['torch']}; width {m['width']}, {m['layers']} layers, context "
        f"{m['context']}, vocabulary {s['vocabulary']}; microbatches of {s['microbatch']}",
        "",
        f"{'':38}{'tokens/s':>9}{'FLOP/s':>15}{'MFU':>7}"
        + "".join(f"{'× ' + way:>11}" for way in ways)
        + f"{'of own':>8}{'of bound':>9}{'compute':>9}{'wait':>6}{'wire':>6}{'memory':>10}",
    ]
    for name, entry in result["entries"].items():
        lines.append(
            _line(name, entry, found[name], ways) if name in found else f"{name:38}  failed: {entry['failed']}"
        )
    return "\n".join(
        [
            *lines,
            "",
            "FLOP/s: the model's own operations, all cards together. × WAY: those of a card, over plain torch's at",
            "the same windows a step. of own: of its speed without a link; of bound: of that or of bytes over",
            "bandwidth, whichever is less. compute, wait, wire: mean share of a stage's time. memory: peak of the",
            "largest stage.",
        ]
    )


def _line(name: str, entry: Entry, found: Ratios, ways: list[str]) -> str:
    def number(value: float | None, width: int, digits: int = 2) -> str:
        return " " * width if value is None else f"{value:{width}.{digits}f}"

    shares = entry.get("shares", {})
    compute, wait, wire = (statistics.mean(shares[part]) if part in shares else None for part in PARTS)
    memory = size(max(entry["peak_memory"])) if entry["peak_memory"] else ""
    speed = rate(entry["model_flops_per_s"], "FLOP/s")
    return (
        f"{name:38}{entry['tokens_per_s']:9.0f}{speed:>15}{number(found['mfu'], 7, 3)}"
        + "".join(number(found["over_torch"].get(way), 11, 3) for way in ways)
        + number(found.get("of_compute_bound"), 8)
        + number(found.get("of_bound"), 9)
        + number(compute, 9)
        + number(wait, 6)
        + number(wire, 6)
        + f"{memory:>10}"
    )


def plot(result: Entry, path: Path) -> None:
    """Model FLOP/s of every case; marks where its wire bound is."""
    done = {name: entry for name, entry in result["entries"].items() if "failed" not in entry}
    fig, [ax] = figure(1, 1, f"Model FLOP/s on {', '.join(dict.fromkeys(result['setting']['hardware']))}")
    fig.set_size_inches(9, 1.5 + 0.35 * len(done))
    for at, entry in enumerate(done.values()):
        ax.barh(
            at, entry["model_flops_per_s"] / 1e12, 0.7, hatch="//" if entry["way"] else None, color=f"C{_hue(entry)}"
        )
        if entry.get("wire_bound"):
            bound = entry["wire_bound"] * entry["flops_per_token"] / 1e12
            ax.plot([bound, bound], [at - 0.4, at + 0.4], color="black", lw=1.5)
    ax.set_yticks(range(len(done)), list(done), fontsize=8)
    ax.set_xlim(0, 1.1 * max((e["model_flops_per_s"] / 1e12 for e in done.values()), default=1.0))
    ax.invert_yaxis()
    ax.set_xlabel("TFLOP/s (hatched: plain torch; black: bytes over bandwidth)")
    save_figure(fig, path)


def _hue(entry: Entry) -> int:
    return 0 if entry["way"] else 1 + _has_basis(entry)
