"""The reference command's work: everything that needs torch."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import typer
import yaml

from protomodels_cli.cli.checks import check_outputs, chosen_device
from protomodels_cli.cli.folders import claim
from protomodels_cli.cli.prepared import prepared
from protomodels_cli.codecs import Carrier
from protomodels_cli.cost.saving import LONGEST
from protomodels_cli.data.kept import keep
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.errors import EXIT_INTERRUPTED, UserError
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.snapshot import write_snapshot
from protomodels_cli.observe.metrics import JsonLines, strict
from protomodels_cli.observe.process import peak_memory
from protomodels_cli.observe.progress import Progress
from protomodels_cli.protocol.steps import is_due
from protomodels_cli.quantities import count, duration, rate, size
from protomodels_cli.spec.load import with_absolute_paths
from protomodels_cli.spec.schema import RunSpec


def run(spec: RunSpec, base: Path, run_dir: Path | None, steps: int, device: str, json_file: Path | None) -> None:
    device = chosen_device(device)
    check_outputs(json_file)
    if run_dir is not None and (run_dir / "metrics.jsonl").exists():
        raise UserError(
            f"{run_dir} already holds a run", "choose another --dir; runs are never overwritten", "run_exists"
        )
    corpus = prepared(spec, base)
    reference = Reference(spec, corpus, Carrier(spec), device, base)
    run_dir = claim(run_dir, spec.name)
    saved = with_absolute_paths(spec, base)
    (run_dir / "run.yaml").write_text(yaml.safe_dump(saved.model_dump(mode="json"), sort_keys=False))
    keep(corpus, run_dir)
    for stage in reference.stages:
        stage.warm_up(spec.batch.size // spec.batch.microbatches, spec.model.context)
    print(_header(spec, corpus, reference, run_dir, device), flush=True)
    started, cpu = time.monotonic(), time.process_time()
    summary = dict[str, Any](steps=steps, parameters=reference.parameters)
    try:
        _train(reference, run_dir, steps, summary)
    except KeyboardInterrupt:
        print(
            f"interrupted after step {reference.step}; metrics and snapshots up to here are in {run_dir}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    summary |= {
        "ln_vocab": math.log(spec.vocab_size),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_s": steps * spec.batch.size * spec.model.context / seconds,
        "peak_memory_bytes": peak_memory(),
        "weights_sha256": reference.weights_sha256(),
        "data_sha256": corpus.sha256,
        "spec_sha256": spec.sha256(),
        "run_dir": str(run_dir),
    }
    print(_footer(summary))
    if json_file is not None:
        json_file.write_text(json.dumps(strict(summary), indent=1) + "\n")


def _train(reference: Reference, run_dir: Path, steps: int, summary: dict[str, Any]) -> None:
    spec, progress = reference.spec, Progress(steps)
    saved, by_steps = time.monotonic(), spec.snapshots.interval is not None
    every = spec.snapshots.every_seconds or (math.inf if by_steps else LONGEST)
    with JsonLines(run_dir / "metrics.jsonl") as metrics:
        for row in reference.train(steps):
            metrics.write(row)
            _show(row, progress, summary)
            if row["event"] != "step":
                continue
            late = time.monotonic() - saved >= every
            if row["step"] == steps or late or is_due(row["step"], spec.snapshots.interval or 0):
                saved = time.monotonic()
                _save(reference, run_dir / "snapshots")


def _save(reference: Reference, folder: Path) -> None:
    keep = reference.spec.snapshots.keep
    r = reference
    write_snapshot(folder, r.step, r.trainers, r.carry, keep)


def _header(spec: RunSpec, corpus: Corpus, reference: Reference, run_dir: Path, device: str) -> str:
    form = f"{spec.subspace.form} with k={spec.subspace.k}" if spec.form.has_basis else spec.subspace.form
    layers = "+".join(str(len(s.slice.layers)) for s in reference.stages)
    tied = "; the tied head starts as a copy of the embedding" if reference.head_was_tied else ""
    start = f"starting from {spec.model.init}{tied}\n" if spec.model.init else ""
    return (
        f"{spec.name}: {form}, {spec.model.layers} layers ({layers}) of width {spec.model.width}, "
        f"{count(reference.parameters)} parameters, {spec.optimizer.name}, on {device}\n"
        f"data: {spec.data.source}, {count(len(corpus.train))} tokens to train on, "
        f"{count(len(corpus.held_out))} held out, "
        f"vocabulary {spec.vocab_size} (ln V = {math.log(spec.vocab_size):.3f})\n"
        f"{start}run directory: {run_dir}"
    )


def _show(row: dict[str, Any], progress: Progress, summary: dict[str, Any]) -> None:
    if row["event"] == "step":
        summary.setdefault("loss_first", row["loss"])
        summary["loss_last"] = row["loss"]
    elif row["event"] == "eval":
        summary["eval_loss"] = row["loss"]
    if line := progress.line(row):
        print(line, flush=True)


def _footer(s: dict[str, Any]) -> str:
    return (
        f"done: loss {s['loss_first']:.4f} → {s['loss_last']:.4f} (ln V = {s['ln_vocab']:.3f}), "
        f"held-out {s['eval_loss']:.4f}; "
        f"{s['steps']} steps in {duration(s['seconds'])}, {rate(s['tokens_per_s'], 'tok/s')}, "
        f"peak memory {size(s['peak_memory_bytes'])}\n"
        f"weights sha256 {s['weights_sha256']}"
    )
