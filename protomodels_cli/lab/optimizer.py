"""`pmtrain lab optimizer`: which optimizers keep constrained matrices in the subspace?

The same constrained model is trained on projected gradients with four optimizers, the same schedule and clipping, and
never re-projected. Drift is ‖W − WΠ‖/‖W‖, the largest over all constrained matrices. Row AdamW and Muon are pmtrain's;
AdamW is torch's; `sign` moves the constrained matrices by the bare sign of their gradients at a tenth of the rate, and
the rest with torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.small import small_reference
from protomodels_cli.model.optim import TrainedParameter
from protomodels_cli.model.reference import Reference
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.protocol.steps import clip_coefficient, gradient_norm, learning_rate

KEEPERS = ("row_adamw", "muon")
LEAVERS = ("adamw", "sign")
POINTS = 25


def run(steps: int = 500, seed: int = 0, device: str = "cpu") -> Result:
    curves: dict[str, dict[str, list[float]]] = {}
    losses: dict[str, float] = {}
    every = max(1, steps // POINTS)
    at = [s for s in range(1, steps + 1) if s % every == 0 or s == steps]
    for dtype in ("float32", "float64"):
        curves[dtype] = {}
        for name in KEEPERS + LEAVERS:
            say(f"training with {name} in {dtype}, {steps} steps …")
            reference = small_reference(
                steps,
                seed,
                device,
                subspace={"form": "constrained", "reproject_interval": 0},
                optimizer={"name": name if name in KEEPERS else "row_adamw"},
                compute={"dtype": dtype},
                stages=1,  # drift does not depend on the cut, and one stage is faster
                batch={"microbatches": 1},
            )
            step = reference.run_step if name in KEEPERS else leaver(reference, name)
            curve = []
            for s in range(1, steps + 1):
                step()
                if s in at:
                    curve.append(drift(reference))
            curves[dtype][name] = curve
            losses[f"{name} {dtype}"] = reference.evaluate()
    return {
        "drift": {name: curve[-1] for name, curve in curves["float32"].items()},
        "drift_float64": {name: curve[-1] for name, curve in curves["float64"].items()},
        "steps": steps,
        "seed": seed,
        "at_steps": at,
        "curves": curves,
        "held_out_loss": losses,
    }


def drift(reference: Reference) -> float:
    """The largest share of a constrained matrix that lies outside S, in float64."""
    worst = 0.0
    for trained in constrained(reference):
        w, u = trained.parameter.detach().double(), trained.form.u.double()
        worst = max(worst, float(torch.linalg.matrix_norm(w - (w @ u) @ u.T) / torch.linalg.matrix_norm(w)))
    return worst


def constrained(reference: Reference) -> list[TrainedParameter]:
    return [p for trainer in reference.trainers for p in trainer.optimizer.parameters if p.form.has_basis]


def leaver(reference: Reference, name: str) -> Callable[[], object]:
    """A training step with an optimizer that the spec refuses, on gradients projected exactly as for the others."""
    spec, tied = reference.spec.optimizer, constrained(reference)
    ids = {id(trained.parameter) for trained in tied}
    free = [p for stage in reference.stages for p in stage.parameters() if id(p) not in ids]
    moved = free if name == "sign" else free + [trained.parameter for trained in tied]
    groups = [
        {"params": [p for p in moved if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in moved if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, spec.lr, (spec.beta1, spec.beta2), spec.eps)

    def step() -> None:
        reference.step += 1
        lr = learning_rate(spec, reference.step, reference.spec.steps)
        for group in adamw.param_groups:
            group["lr"] = lr
        reference.accumulate(reference.step)
        projected = {}
        for trained in tied:
            u, gradient = trained.form.u, trained.parameter.grad
            assert gradient is not None
            projected[trained.name] = (gradient @ u) @ u.T
            trained.parameter.grad = projected[trained.name]
        norms = [float(torch.linalg.vector_norm(p.grad, dtype=torch.float64)) ** 2 for p in free if p.grad is not None]
        norms += [float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in projected.values()]
        coefficient = clip_coefficient(gradient_norm(norms), spec.clip)
        for parameter in (p for stage in reference.stages for p in stage.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(coefficient)
        adamw.step()
        for trained in tied:
            if name == "sign":
                with torch.no_grad():
                    trained.parameter.add_(projected[trained.name].sign(), alpha=-lr / 10)
        for parameter in (p for stage in reference.stages for p in stage.parameters()):
            parameter.grad = None

    return step


def report(result: Result) -> str:
    lines = [
        f"share of the constrained matrices outside S after {result['steps']} steps, never re-projected",
        f"{'optimizer':10} {'float32':>9} {'float64':>9}   held-out loss (float32)",
    ]
    for name, value in result["drift"].items():
        verdict = "stays in S" if value <= 1e-5 else "leaves S"
        loss = result["held_out_loss"][f"{name} float32"]
        lines.append(f"{name:10} {value:9.1e} {result['drift_float64'][name]:9.1e}   {loss:.3f}   {verdict}")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    fig, axes = figure(1, 2, "Drift out of the subspace on projected gradients, never re-projected")
    colours = {"row_adamw": "#2a6f97", "muon": "#81b29a", "adamw": "#e07a5f", "sign": "#9b2226"}
    for ax, dtype, bound in zip(axes, ("float32", "float64"), (1e-5, 1e-12), strict=True):
        for name, curve in result["curves"][dtype].items():
            ax.plot(result["at_steps"], curve, label=name, color=colours[name])
        ax.axhline(bound, color="black", linestyle=":", linewidth=1)
        ax.annotate(f"bound {bound:g}", (1, bound), va="bottom", fontsize=8)
        ax.set_yscale("log")
        ax.set_title(dtype)
        ax.set_xlabel("step")
        ax.set_ylabel("‖W − WΠ‖ / ‖W‖, largest")
        ax.legend()
    save_figure(fig, path)
