"""`pmtrain lab reconstruct`: is what crosses a boundary really everything?

At each boundary the stream is encoded to k numbers a token and decoded again, forward and backward. The cut model
is held against a plain, uncut Llama with the weights multiplied out, at initialisation and after training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protomodels_cli.huggingface.config import config_of
from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.lab import plain_llama
from protomodels_cli.lab.memory import peak_bytes
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.small import small_reference
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.plain import multiplied_out
from protomodels_cli.model.reference import Reference
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.protocol.messages import MessageKey

CONTEXTS = (64, 256, 1024)


def run(steps: int = 200, seed: int = 0, device: str = "cpu") -> Result:
    rows: list[dict[str, Any]] = []
    for form, optimizer in (("constrained", "row_adamw"), ("reparam", "muon")):
        for dtype in ("float64", "float32"):
            say(f"training the {form} form in {dtype}, {steps} steps …")
            reference = small_reference(
                steps,
                seed,
                device,
                subspace={"form": form},
                optimizer={"name": optimizer},
                compute={"dtype": dtype},
            )
            rows.append({"form": form, "dtype": dtype, "moment": "start", **compare(reference)})
            for _ in reference.train():
                pass
            rows.append({"form": form, "dtype": dtype, "moment": f"after {steps} steps", **compare(reference)})

    def worst(kind: str, dtype: str) -> float:
        return max(max(row[kind].values()) for row in rows if row["dtype"] == dtype)

    return {
        "max_error_float64": worst("forward", "float64"),
        "max_error_float32": worst("forward", "float32"),
        "max_grad_error_float64": worst("backward", "float64"),
        "max_grad_error_float32": worst("backward", "float32"),
        "steps": steps,
        "seed": seed,
        "rows": rows,
        "memory": memory(seed, device),
    }


def compare(reference: Reference) -> dict[str, dict[str, float]]:
    """Relative errors of one forward and backward, cut against plain. Leaves the model as it was."""
    config = config_of(reference.spec)
    windows = torch.from_numpy(reference.batches.microbatch(reference.step + 1, 0)).to(reference.device)
    ids, targets = windows[:, :-1], windows[:, 1:]
    plain = {name: w.requires_grad_() for name, w in multiplied_out(reference.stages).items()}
    streams, logits = plain_llama.streams_and_logits(plain, config, ids)
    for stream in streams:
        stream.retain_grad()
    plain_llama.mean_loss(logits, targets).backward()

    stages = reference.stages
    sent: list[Tensor] = []  # each stage's own state, before it is encoded
    hooks = [
        stage.layers[str(stage.slice.layers[-1])].register_forward_hook(
            lambda _m, _a, state: sent.append(state.detach())
        )
        for stage in stages[:-1]
    ]
    flights = reference.forward(ids, reference.step + 1, 0)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        cut_logits = stages[-1].logits(flights[-1].output)
    _, gradient = stages[-1].run_loss(flights[-1], targets, 1.0 / targets.numel())
    received = [gradient]  # backward messages, from the last boundary to the first
    for i in reversed(range(len(stages) - 1)):
        assert gradient is not None
        arrived = reference.carry(gradient, MessageKey(reference.step + 1, 0, i, "backward"))
        gradient = stages[i].run_backward(flights[i], arrived)
        received.append(gradient)

    forward = {"logits": relative(cut_logits, logits)}
    backward: dict[str, float] = {}
    for i, stage in enumerate(stages[:-1]):
        basis, table = stage.basis, stage.t_fixed
        assert basis is not None
        assert table is not None
        layer = stage.slice.end_layer
        anchor = table.rows(ids, logits.dtype)
        arrived = stages[i + 1].form.decode(flights[i].output.detach(), anchor)
        x = stages[i + 1].form.read(arrived, anchor)
        forward[f"boundary {i} against uncut"] = relative(x, streams[layer])
        if stage.form.state_width(stage.shape.sizes) != reference.spec.boundary_width:
            forward[f"boundary {i} decode(encode(x))"] = relative(arrived, sent[i])
        stream_gradient = streams[layer].grad
        message = received[len(stages) - 2 - i]
        assert stream_gradient is not None
        assert message is not None
        backward[f"boundary {i} against uncut G·U"] = relative(message, stream_gradient @ basis.u)
    for name, ours, theirs in parameter_gradients(reference, plain):
        backward[name] = relative(ours, theirs)
    for trainer in reference.trainers:
        trainer.optimizer.discard()
    return {"forward": forward, "backward": backward}


def parameter_gradients(reference: Reference, plain: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Every parameter's gradient beside the plain model's, both as coordinates g·U where the matrix is tied to U."""
    pairs = []
    for stage in reference.stages:
        for name, module in stage.named_modules():
            if not isinstance(module, Writer | Matrix | RMSNorm):
                continue
            ours, theirs = module.weight.grad, plain[hugging_face_name(name)].grad
            assert ours is not None
            assert theirs is not None
            if isinstance(module, Writer):
                theirs = theirs if name == "embed" else theirs.T
                if module.form.has_basis:
                    theirs, ours = theirs @ module.form.u, module.form.project(ours)
            pairs.append((name, ours, theirs))
    return pairs


def relative(found: Tensor, right: Tensor) -> float:
    found, right = found.detach().double(), right.detach().double()
    return float(torch.linalg.vector_norm(found - right) / torch.linalg.vector_norm(right))


def memory(seed: int, device: str) -> list[dict[str, Any]]:
    """What the method adds to a middle stage, at three context lengths: fixed tables, and working memory."""
    rows = []
    for context in CONTEXTS:
        say(f"measuring memory at context {context} …")
        peaks, fixed = {}, 0
        for form in ("dense", "constrained", "reparam"):
            reference = small_reference(
                1,
                seed,
                device,
                subspace={"form": form},
                model={"context": context},
                batch={"size": 1, "microbatches": 1},
            )
            stage, spec = reference.stages[1], reference.spec
            windows = torch.from_numpy(reference.batches.microbatch(1, 0)).to(reference.device)
            message = torch.randn(1, context, spec.boundary_width, device=device)

            def work(stage: Any = stage, ids: Tensor = windows[:, :-1], message: Tensor = message) -> None:
                flight = stage.run_forward(ids, message)
                stage.run_backward(flight, torch.ones_like(flight.output))

            work()  # parameters have their gradients from here on
            peaks[form] = peak_bytes(work)
            if stage.basis is not None and stage.t_fixed is not None:
                fixed = stage.basis.u.nbytes + stage.t_fixed.signs.nbytes
        rows.append(
            {
                "context": context,
                "fixed_bytes": fixed,
                "peak_bytes": peaks,
                "extra_bytes": {f: peaks[f] - peaks["dense"] for f in ("constrained", "reparam")},
            }
        )
    return rows


def report(result: Result) -> str:
    lines = [
        "relative error, cut into 4 stages against a plain uncut Llama with the weights multiplied out",
        f"{'form':12} {'type':8} {'when':16} {'forward':>9} {'backward':>9}",
    ]
    for row in result["rows"]:
        f, b = max(row["forward"].values()), max(row["backward"].values())
        lines.append(f"{row['form']:12} {row['dtype']:8} {row['moment']:16} {f:9.1e} {b:9.1e}")
    lines.append("bytes of memory on a middle stage, one microbatch of one window, float32")
    lines.append(f"{'context':>9} {'U and T_fixed':>14} {'peak, dense':>12} {'constrained':>12} {'reparam':>12}")
    for row in result["memory"]:
        peak = row["peak_bytes"]
        peaks = " ".join(f"{peak[form]:12}" for form in ("dense", "constrained", "reparam"))
        lines.append(f"{row['context']:9} {row['fixed_bytes']:14} {peaks}")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    fig, (left, right) = figure(1, 2, "A boundary is crossed without loss: cut model against a plain, uncut Llama")
    rows = result["rows"]
    labels = [f"{r['form']} {r['dtype']}\n{r['moment']}" for r in rows]
    for offset, kind, colour in ((-0.2, "forward", "#2a6f97"), (0.2, "backward", "#e07a5f")):
        places = [i + offset for i in range(len(rows))]
        left.barh(places, [max(r[kind].values()) for r in rows], 0.38, label=kind, color=colour)
    left.set_xscale("log")
    left.set_xlim(1e-17, 1e-4)
    left.set_yticks(range(len(rows)), labels, fontsize=7)
    left.invert_yaxis()
    left.set_xlabel("largest relative error")
    for bound, name in ((1e-12, "float64 bound"), (1e-5, "float32 bound, forward")):
        left.axvline(bound, color="black", linestyle=":", linewidth=1)
        left.annotate(name, (bound, -0.6), ha="center", va="bottom", fontsize=7)
    left.legend(loc="upper right", fontsize=8)
    contexts = [r["context"] for r in result["memory"]]
    right.plot(
        contexts,
        [r["fixed_bytes"] / 1024 for r in result["memory"]],
        "o-",
        color="#2a6f97",
        label="fixed: U and T_fixed",
    )
    for form, colour in (("constrained", "#e07a5f"), ("reparam", "#81b29a")):
        extra = [r["extra_bytes"][form] / 1024 for r in result["memory"]]
        right.plot(contexts, extra, "o-", color=colour, label=f"peak of {form} − peak of dense")
    right.set_xlabel("context length (tokens in the microbatch)")
    right.set_ylabel("KiB on a middle stage")
    right.legend()
    save_figure(fig, path)
