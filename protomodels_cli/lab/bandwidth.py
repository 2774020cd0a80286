"""How much compression does a link need, and when does more of it stop paying?

Loss curves come from training (the reference, which the pipeline equals); the time of a step from playing the pipeline
through for every link (`cost/forecast.py`, held against real runs by `bench wan`). Together they say how long it takes
to reach a loss, which is what anyone cares about.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from protomodels_cli.cost.forecast import SLACK, forecast, seconds_by_link
from protomodels_cli.errors import UserError
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.recipes import Recipe, carried, dense
from protomodels_cli.lab.results import Result
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import SCALES, Scale, scaled, with_text
from protomodels_cli.lab.time_to_loss import steps_to
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.quantities import plural, rate
from protomodels_cli.spec.schema import LinkSpec, RunSpec
from protomodels_cli.worker.device import measure_flops

BANDWIDTHS = (10, 50, 80, 200, 1000)  # Mbit/s
LATENCIES = (5, 25, 100)  # ms
SHARES = (4, 8, 16, 32, 100)  # k = d / share
MICROBATCHES = 8

CPU = replace(SCALES["cpu"], width=200, heads=4, kv_heads=2, segments=4, vocabulary=256, batch=16, text=4_000_000)


def recipes(scale: Scale) -> list[Recipe]:
    ks = [max(1, round(scale.width / share)) for share in SHARES]
    found = [dense("bf16"), dense("int8"), *(Recipe("two_stream", "segment", k, "int8") for k in ks)]
    return [carried(recipe, scale) for recipe in found]


def run(
    scale_name: str,
    steps: int | None,
    seed: int,
    speed: float | None,
    target: float | None,
    kept: Path | None,
    text: str | None,
    device: str,
) -> Result:
    """`speed` in operations a second of every peer; measured on this device where it is not given."""
    scale = with_text(CPU if scale_name == "cpu" else scaled(scale_name), text)
    scale = replace(scale, steps=steps or scale.steps, microbatches=MICROBATCHES)
    runs = [Run(scale, recipe, seed, device) for recipe in recipes(scale)]
    with Bench(scale.workers, kept) as bench:
        trained = bench.results(runs)
    if bench.missing:
        raise UserError(f"{plural(len(bench.missing), 'run')} failed", "see what is said above", "runs_failed")
    curves = {_name(r.recipe): t["evals"] for r, t in zip(runs, trained, strict=True) if t is not None}
    specs = {_name(r.recipe): r.spec() for r in runs}
    spec = specs["dense bf16"]
    flops = speed or measure_flops(spec, torch.device(device), seconds=1.0)
    evals = curves["dense bf16"]
    wanted = target if target is not None else evals[len(evals) // 2]["loss"]
    if wanted is None:
        raise UserError("dense bf16 has no finite loss to reach", "name a loss with --target", "diverged")
    rows = [
        _row(name, specs[name], mbit, ms, flops, curves[name], wanted)
        for name in curves
        for mbit in BANDWIDTHS
        for ms in LATENCIES
    ]
    return {
        "setting": {
            "stages": spec.stages,
            "model": spec.model.model_dump(),
            "batch": spec.batch.model_dump(),
            "tokens_per_step": scale.tokens_per_step,
            "steps": scale.steps,
            "seed": seed,
            "flops": flops,
            "target_loss": wanted,
        },
        "curves": curves,
        "rows": rows,
        "free_from_mbit": {name: {ms: _free_from(specs[name], ms, flops) for ms in LATENCIES} for name in curves},
        "best": _best(rows),
    }


def _name(recipe: Recipe) -> str:
    return f"dense {recipe.codec}" if recipe.k is None else f"k={recipe.k} {recipe.codec}"


def _row(
    name: str, spec: RunSpec, mbit: float, ms: float, flops: float, evals: list[Result], target: float
) -> dict[str, Any]:
    predicted = forecast(spec, _link(mbit, ms), flops)
    steps = steps_to(evals, target)
    return {
        "method": name,
        "form": spec.subspace.form,
        "k": spec.subspace.k if spec.form.has_basis else None,
        "codec": spec.wire.forward,
        "mbit": mbit,
        "latency_ms": ms,
        "tokens_per_s": predicted.tokens_per_s,
        "step_s": predicted.step_seconds,
        "without_link_s": predicted.compute_seconds,
        "limited_by": asdict(predicted.bottleneck),
        "loss": evals[-1]["loss"],
        "steps_to_target": steps,
        "seconds_to_target": None if steps is None else steps * predicted.step_seconds,
    }


def _link(mbit: float, ms: float) -> LinkSpec:
    return LinkSpec(bandwidth=f"{mbit:.6f}mbit", latency=f"{ms}ms")


def _free_from(spec: RunSpec, ms: float, flops: float) -> float:
    """The bandwidth from which on more of it speeds a step up by less than a tenth."""
    seconds = seconds_by_link(spec, flops)
    most = seconds(_link(1e6, ms))
    low, high = 0.01, 1e5
    for _ in range(20):
        middle = math.sqrt(low * high)
        fine = seconds(_link(middle, ms)) <= SLACK * most
        low, high = (low, middle) if fine else (middle, high)
    return high


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every link: what reaches the target first, and the k with which the subspace form does; smaller ones lose."""
    found = []
    for mbit in BANDWIDTHS:
        for ms in LATENCIES:
            here = [r for r in rows if (r["mbit"], r["latency_ms"]) == (mbit, ms) and r["seconds_to_target"]]
            if not here:
                continue
            first = min(here, key=lambda r: r["seconds_to_target"])
            subspace = [r for r in here if r["k"] is not None]
            best_k = min(subspace, key=lambda r: r["seconds_to_target"])["k"] if subspace else None
            keys = ("method", "seconds_to_target")
            found.append({"mbit": mbit, "latency_ms": ms, **{key: first[key] for key in keys}, "best_k": best_k})
    return found


def report(result: Result) -> str:
    s, latency = result["setting"], 25
    lines = [
        f"width {s['model']['width']}, {s['stages']} stages of peers with {rate(s['flops'], 'FLOP/s')}, "
        f"{s['tokens_per_step']} tokens a step; {s['steps']} steps, target loss {s['target_loss']:.4f}",
        "one seed, one set of rates for all: `lab frontier` tunes each; tokens/s are forecasts",
        "",
        f"{latency} ms; tokens/s and, below, seconds to the target loss (– where {s['steps']} steps do not reach it)",
        f"{'':14}{'loss':>8}{'steps':>7}" + "".join(f"{mbit:>8} Mbit/s" for mbit in BANDWIDTHS) + "   free of it from",
    ]
    for name, rows in _by_method(result["rows"], latency).items():
        steps = rows[0]["steps_to_target"]
        free = result["free_from_mbit"][name][latency]
        lines.append(
            f"{name:14}{rows[0]['loss']:8.4f}{'–' if steps is None else round(steps):>7}"
            + "".join(f"{r['tokens_per_s']:15.0f}" for r in rows)
            + f"{free:12.1f} Mbit/s"
        )
        lines.append(
            f"{'':29}"
            + "".join(
                f"{'–' if r['seconds_to_target'] is None else round(r['seconds_to_target'], 1):>15}" for r in rows
            )
        )
    lines += ["", "first to the target, and the k with which the subspace form is fastest to it (a smaller one loses):"]
    for b in result["best"]:
        k = "none reaches it" if b["best_k"] is None else f"k={b['best_k']}"
        lines.append(
            f"  {b['mbit']:5} Mbit/s, {b['latency_ms']:3} ms: {b['method']:12} in {b['seconds_to_target']:.1f} s; {k}"
        )
    return "\n".join(lines)


def _by_method(rows: list[dict[str, Any]], latency: float) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        if r["latency_ms"] == latency:
            found.setdefault(r["method"], []).append(r)
    return found


def plot(result: Result, path: Path) -> None:
    fig, (left, right) = figure(1, 2, "What a link costs, and what compression buys (25 ms)")
    for n, (name, rows) in enumerate(_by_method(result["rows"], 25).items()):
        style = {
            "color": f"C{n}",
            "label": name,
            "ls": "--" if rows[0]["k"] is None else "-",
            "marker": "o",
            "ms": 3,
        }
        left.plot([r["mbit"] for r in rows], [r["tokens_per_s"] for r in rows], **style)
        reached = [r for r in rows if r["seconds_to_target"] is not None]
        right.plot([r["mbit"] for r in reached], [r["seconds_to_target"] for r in reached], **style)
    for ax, label in ((left, "tokens/s"), (right, f"seconds to loss {result['setting']['target_loss']:.3f}")):
        ax.set(xscale="log", xlabel="Mbit/s of every peer", ylabel=label, ylim=(0, None))
        ax.set_xticks(BANDWIDTHS, [str(b) for b in BANDWIDTHS])
        ax.minorticks_off()
    left.legend(frameon=False, fontsize=7)
    save_figure(fig, path)
