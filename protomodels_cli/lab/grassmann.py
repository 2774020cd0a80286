"""`pmtrain lab grassmann`: does a moving subspace settle, or does it swing to and fro?

A real training run with many updates of U. The first updates turn a random subspace towards the gradients; what
counts is what happens after that.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.small import small_reference
from protomodels_cli.model.basis import principal_angles
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.spec.model import UpdateSpec
from protomodels_cli.spec.optimizer import OptimizerSpec

CONTRAST = (("muon", 0.25), ("muon", 1.0), ("adamw", 0.5), ("adamw", 1.0))  # to hold the spec's defaults against
SCHEDULE = {"warmup_steps": 10, "decay": "constant"}  # a falling rate would calm any basis by itself
CRITERION = (
    "after the first {adaptation} updates: `stable` if the basis does not turn back (median distance over two updates "
    "at least that over one) and its turns do not run away (median of the last third at most twice that of the first "
    "third), otherwise `oscillating`; distances are ‖sin θ‖ of the principal angles"
)


def run(updates: int = 40, interval: int = 10, seed: int = 0, device: str = "cpu") -> Result:
    default = OptimizerSpec().name, UpdateSpec().step_size
    result = follow(updates, interval, *default, seed, device)
    others = [follow(updates, interval, *contrast, seed, device) for contrast in CONTRAST]
    keys = ("optimizer", "step_size", "verdict", "reversal_ratio", "turn_growth", "held_out_loss")
    return result | {
        "criterion": CRITERION.format(adaptation=adaptation(updates)),
        "contrast": [{key: r[key] for key in keys} for r in (result, *others)],
        "held_out_loss_without_updates": {
            optimizer: without_updates(updates, interval, optimizer, seed, device) for optimizer in ("muon", "adamw")
        },
    }


def without_updates(updates: int, interval: int, optimizer: str, seed: int, device: str) -> float:
    say(f"training with {optimizer}, U never moves …")
    reference = small_reference(
        updates * interval + 3, seed, device, optimizer={"name": optimizer, "schedule": SCHEDULE}
    )
    for _ in reference.train():
        pass
    return reference.evaluate()


def follow(updates: int, interval: int, optimizer: str, step_size: float, seed: int, device: str) -> Result:
    """Train with `updates` updates and keep every basis."""
    say(f"training with {optimizer}, {updates} updates of step size {step_size:g} …")
    reference = small_reference(
        updates * interval + 3,
        seed,
        device,
        subspace={"update": {"interval": interval, "window": interval, "delay": 2, "step_size": step_size}},
        optimizer={"name": optimizer, "schedule": SCHEDULE},
    )
    assert reference.basis is not None
    bases: list[Tensor] = [reference.basis.u]
    rows, losses = [], []
    for row in reference.train():
        if row["event"] == "subspace":
            assert reference.next_basis is not None
            bases.append(reference.next_basis.basis.u)
            rows.append(row)
        elif row["event"] == "step":
            losses.append(row["loss"])
    verdict, ratio, growth = judge(bases)
    return {
        "orthonormality_error": max(row["orthonormality_error"] for row in rows),
        "verdict": verdict,
        "reversal_ratio": ratio,
        "turn_growth": growth,
        "updates": len(rows),
        "interval": interval,
        "optimizer": optimizer,
        "step_size": step_size,
        "seed": seed,
        "captured_before": [row["captured_before"] for row in rows],
        "captured_after": [row["captured_after"] for row in rows],
        "principal_angles": [principal_angles(a, b).tolist() for a, b in pairwise(bases)],
        "eigenvalues": [torch.linalg.eigvalsh(u.double().T @ u.double()).tolist() for u in bases[1:]],
        "loss": losses,
        "held_out_loss": reference.evaluate(),
        "rows": rows,
    }


def adaptation(updates: int) -> int:
    """Updates that are left out of the verdict: ten, or a quarter of a short run."""
    return min(10, updates // 4)


def distance(a: Tensor, b: Tensor) -> float:
    return float(principal_angles(a, b).sin().square().sum().sqrt())


def judge(bases: list[Tensor]) -> tuple[str, float, float]:
    """The verdict, and the two numbers it rests on."""
    settled = bases[adaptation(len(bases) - 1) :]
    one = [distance(a, b) for a, b in pairwise(settled)]
    two = [distance(a, b) for a, b in zip(settled, settled[2:], strict=False)]
    third = max(1, len(one) // 3)
    ratio = median(two) / median(one)
    growth = median(one[-third:]) / median(one[:third])
    return ("stable" if ratio >= 1.0 and growth <= 2.0 else "oscillating"), ratio, growth


def report(result: Result) -> str:
    largest = [a[-1] for a in result["principal_angles"]]
    away = max(abs(value - 1) for values in result["eigenvalues"] for value in values)
    lines = [
        f"{result['updates']} updates of U, {result['interval']} steps apart, {result['optimizer']}, "
        f"step size {result['step_size']:g}",
        f"largest ‖UᵀU − I‖_F {result['orthonormality_error']:.1e}; eigenvalues of UᵀU within 1 ± {away:.1e}",
        f"largest principal angle: first update {largest[0]:.3f} rad, median of the last ten "
        f"{median(largest[-10:]):.3f} rad",
        f"gradient energy captured by the basis in use: {result['captured_before'][0]:.1%} at first (random: 12.5%), "
        f"{median(result['captured_before'][-10:]):.1%} in the last ten",
        f"{'optimizer':9} {'step size':>9} {'two / one updates':>18} {'turn growth':>12} {'held-out loss':>14}"
        "  verdict",
    ]
    for row in result["contrast"]:
        lines.append(
            f"{row['optimizer']:9} {row['step_size']:9g} {row['reversal_ratio']:18.2f} {row['turn_growth']:12.2f} "
            f"{row['held_out_loss']:14.3f}  {row['verdict']}"
        )
    for optimizer, loss in result["held_out_loss_without_updates"].items():
        lines.append(f"{optimizer:9} {'none':>9} {'':18} {'':12} {loss:14.3f}")
    lines.append(f"verdict: {result['verdict']} ({result['criterion']})")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    fig, (turn, energy, ortho, loss) = figure(2, 2, f"A moving subspace: {result['verdict']}")
    x = range(1, result["updates"] + 1)
    angles = result["principal_angles"]
    turn.fill_between(
        x, [a[0] for a in angles], [a[-1] for a in angles], alpha=0.2, color="#2a6f97", label="all angles"
    )
    turn.plot(x, [a[-1] for a in angles], color="#2a6f97", label="largest")
    turn.plot(x, [median(a) for a in angles], color="#81b29a", label="median")
    turn.axvline(adaptation(result["updates"]), color="black", linestyle=":", linewidth=1)
    turn.set_title("principal angles between successive bases (rad)")
    energy.plot(x, result["captured_before"], color="#e07a5f", label="by the basis in use")
    energy.plot(x, result["captured_after"], color="#2a6f97", label="by the next one")
    energy.set_ylim(0, 1)
    energy.set_title("share of gradient energy captured")
    eigenvalues = result["eigenvalues"]
    ortho.plot(x, [max(abs(v - 1) for v in e) for e in eigenvalues], color="#81b29a", label="largest |λ(UᵀU) − 1|")
    ortho.plot(x, [r["orthonormality_error"] for r in result["rows"]], color="#2a6f97", label="‖UᵀU − I‖_F")
    ortho.axhline(1e-6, color="black", linestyle=":", linewidth=1)
    ortho.set_yscale("log")
    ortho.set_title("orthonormality of the stored float32 basis")
    loss.plot(range(1, len(result["loss"]) + 1), result["loss"], color="#3d405b", linewidth=1)
    loss.set_title("training loss")
    for ax in (turn, energy, ortho):
        ax.set_xlabel("update")
        ax.legend(fontsize=8)
    loss.set_xlabel("step")
    save_figure(fig, path)
