"""`pmtrain lab rank`: do the matrices that write to the stream lose rank while a model trains?

Stable rank ‖W‖_F²/‖W‖₂² of every matrix over the steps: of a dense transformer on text, and of a CNN, a vision
transformer and an MLP-mixer on scikit-learn's digits. The paper builds on projection matrices (W_o, W_down)
becoming low-rank by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.small import small_reference
from protomodels_cli.lab.vision import Cnn, Mixer, Vit, digits
from protomodels_cli.model.state import weights
from protomodels_cli.observe.pictures import figure, save_figure

POINTS = 16
WRITERS = ("o", "down", "token_down")  # matrices that write to a residual stream
Step = Callable[[int], object]
Matrices = Callable[[], dict[str, Tensor]]


def run(steps: int = 600, seed: int = 0, device: str = "cpu") -> Result:
    result: Result = {"stable_rank": {}, "full_rank": {}, "at_steps": {}, "score": {}, "steps": steps, "seed": seed}

    def watch(name: str, matrices: Matrices, step: Step, score: Callable[[], float]) -> None:
        say(f"training the {name}, {steps} steps …")
        at: list[int] = []
        curves: dict[str, list[float]] = {key: [] for key in matrices()}
        every = max(1, steps // POINTS)
        for s in range(steps + 1):
            if s:
                step(s)
            if s % every == 0 or s == steps:
                at.append(s)
                for key, matrix in matrices().items():
                    curves[key].append(stable_rank(matrix))
        result["stable_rank"][name], result["at_steps"][name] = curves, at
        result["full_rank"][name] = {key: min(m.shape) for key, m in matrices().items()}
        result["score"][name] = score()

    reference = small_reference(
        steps,
        seed,
        device,
        subspace={"form": "dense"},
        optimizer={"name": "adamw"},  # as the image models: Muon's updates have full rank by design
        stages=1,
        batch={"microbatches": 1},
    )
    watch(
        "transformer",
        lambda: {k.removesuffix(".weight"): w for k, w in weights(reference.stages).items() if w.ndim == 2},
        lambda s: reference.run_step(),
        reference.evaluate,
    )
    for name, model in image_models(seed):
        watch(name, *trainer(model.to(device), seed))
    return result


def stable_rank(w: Tensor) -> float:
    values = torch.linalg.svdvals(w.detach().double())
    return float(values.square().sum() / values[0].square())


def image_models(seed: int) -> Iterator[tuple[str, nn.Module]]:
    for name, kind in (("cnn", Cnn), ("vit", Vit), ("mixer", Mixer)):
        torch.manual_seed(seed)
        yield name, kind()


def trainer(model: nn.Module, seed: int) -> tuple[Matrices, Step, Callable[[], float]]:
    """AdamW on the digits, 64 images a step."""
    device = next(model.parameters()).device
    train_x, train_y, test_x, test_y = (t.to(device) for t in digits(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def matrices() -> dict[str, Tensor]:
        named = {n.removesuffix(".weight"): p for n, p in model.named_parameters() if n.endswith("weight")}
        return {name: p.flatten(1) for name, p in named.items() if p.ndim > 1}

    def step(s: int) -> None:
        pick = torch.randint(len(train_x), (64,), generator=torch.Generator().manual_seed(seed * 1_000_003 + s))
        loss = F.cross_entropy(model(train_x[pick]), train_y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(test_x).argmax(-1) == test_y).double().mean())

    return matrices, step, accuracy


def kind_of(matrix: str) -> str:
    """`layers.2.attn.o` → `o`: matrices of the same kind are averaged over layers in the report and the plot."""
    parts = matrix.split(".")
    return matrix if parts[0] not in ("layers", "blocks") else parts[-1]


def by_kind(result: Result, architecture: str) -> dict[str, list[float]]:
    """Share of the full rank that is left, per kind of matrix, over the steps."""
    groups: dict[str, list[list[float]]] = {}
    for matrix, curve in result["stable_rank"][architecture].items():
        full = result["full_rank"][architecture][matrix]
        groups.setdefault(kind_of(matrix), []).append([value / full for value in curve])
    return {kind: [fmean(column) for column in zip(*curves, strict=True)] for kind, curves in groups.items()}


def report(result: Result) -> str:
    lines = [f"stable rank as a share of the full rank, start → step {result['steps']}; * writes to a residual stream"]
    for name, score in result["score"].items():
        what = f"held-out loss {score:.3f}" if name == "transformer" else f"test accuracy {score:.1%}"
        lines.append(f"{name} ({what})")
        for kind, curve in by_kind(result, name).items():
            mark = "*" if kind in WRITERS else " "
            lines.append(f"  {kind:12}{mark} {curve[0]:6.1%} → {curve[-1]:6.1%}")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    fig, axes = figure(
        2, 2, "Stable rank while training, as a share of the full rank (bold: writes to a residual stream)"
    )
    for ax, name in zip(axes, result["stable_rank"], strict=True):
        for kind, curve in by_kind(result, name).items():
            bold = kind in WRITERS
            ax.plot(
                result["at_steps"][name], curve, label=kind, linewidth=2.6 if bold else 1.1, alpha=1 if bold else 0.7
            )
        ax.set_title(name)
        ax.set_xlabel("step")
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=7, ncols=2)
    save_figure(fig, path)
