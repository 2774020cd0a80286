"""The runs that experiments compare: what one is, how it is trained and measured, and how many go side by side.

Nothing here knows which runs are compared with which.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from types import TracebackType
from typing import Any

import torch

from protomodels_cli.codecs import Carrier, parse_codec
from protomodels_cli.cost.traffic import boundary_bytes, id_bytes
from protomodels_cli.data.prepare import Corpus, prepare
from protomodels_cli.data.shards import TokenStream, split_tail
from protomodels_cli.errors import RunStopped, UserError
from protomodels_cli.lab.results import Result, say
from protomodels_cli.model.reference import Reference
from protomodels_cli.observe.metrics import strict
from protomodels_cli.quantities import duration, plural
from protomodels_cli.spec import spec_from
from protomodels_cli.spec.schema import RunSpec

EPOCHS = 3  # at least: AQ-SGD sends changes since a sample was last seen
EVALS = 9
TRAINING = 2  # to be raised when `train` changes: results kept from before are then not taken for its own
CURVE_POINTS = 60


@dataclass(frozen=True)
class Scale:
    """The model, the text and the length that all runs share. A stage for every layer: the most boundaries."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    vocabulary: int  # 256: bytes
    text: int  # bytes, from which the training text is the beginning, and the held-out text is drawn
    batch: int
    microbatches: int
    steps: int
    eval_windows: int
    ks: tuple[int, ...]
    k: int  # where only one is tried
    rank: int  # of the low-rank codec
    seeds: int
    workers: int
    lr: float  # where tuning starts
    epochs: int = EPOCHS

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def train_tokens(self) -> int:
        """So little text that it is read `epochs` times."""
        return self.steps * self.batch // self.epochs * self.context + 1


SCALES = {
    "cpu": Scale(
        name="cpu",
        layers=4,
        width=64,
        heads=4,
        kv_heads=2,
        context=32,
        vocabulary=256,
        text=700_000,
        batch=16,
        microbatches=1,  # at this size most of a step is encoding, message by message
        steps=150,
        eval_windows=96,
        ks=(4, 8, 16),
        k=8,
        rank=8,
        seeds=3,
        workers=2,
        lr=1.6e-2,
    ),
    "gpu": Scale(
        name="gpu",
        layers=8,
        width=512,
        heads=8,
        kv_heads=4,
        context=512,
        vocabulary=4096,
        text=12_000_000,
        batch=32,
        microbatches=2,
        steps=500,
        eval_windows=64,
        ks=(16, 32, 64),
        k=64,
        rank=64,
        seeds=2,
        workers=3,
        lr=4e-3,
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What differs between runs, seed aside."""

    form: str
    k: int | None
    forward: str
    backward: str
    optimizer: str
    lr: float
    embedding_std: float = 0.1
    t_fixed_scale: float | None = None

    @property
    def codec(self) -> str:
        return self.forward if self.forward == self.backward else f"{self.forward}|{self.backward}"

    @property
    def name(self) -> str:
        width = "" if self.k is None else f" k={self.k}"
        return f"{self.form}{width} {self.codec} {self.optimizer}"


@dataclass(frozen=True)
class Run:
    scale: Scale
    recipe: Recipe
    seed: int
    device: str

    def spec(self) -> RunSpec:
        r, steps = self.recipe, self.scale.steps
        subspace: dict[str, Any] = {"form": r.form}
        if r.k is not None:
            subspace |= {"k": r.k, "t_fixed": {"scale": r.t_fixed_scale}}
        spec = {
            "seed": self.seed,
            "groups": {"embedding": {"std": r.embedding_std}},
            "subspace": subspace,
            "optimizer": {"name": r.optimizer, "lr": r.lr, "schedule": {"warmup_steps": math.ceil(steps / 20)}},
            "wire": {"forward": r.forward, "backward": r.backward},
        }
        return _spec(self.scale, spec)

    def key(self) -> str:
        """Names the run that a kept result belongs to."""
        return f"{self.spec().sha256()} {self.scale.train_tokens} {self.device} {TRAINING}"


def _spec(scale: Scale, own: dict[str, Any]) -> RunSpec:
    """What a run has of its own, in the model and on the text that all share."""
    sizes = {field: getattr(scale, field) for field in ("layers", "width", "heads", "kv_heads", "context")}
    shared = {
        "name": "frontier",
        "steps": scale.steps,
        "stages": scale.layers,
        "batch": {"size": scale.batch, "microbatches": scale.microbatches},
        "data": {"source": "python", "max_bytes": scale.text, "val_fraction": 0.1},
        "tokenizer": {"kind": "bytes" if scale.vocabulary == 256 else "bpe", "vocab_size": scale.vocabulary},
        "eval": {"interval": math.ceil(scale.steps / EVALS), "windows": scale.eval_windows},
    }
    return spec_from({**shared, **own, "model": {**sizes, **own.get("model", {})}})


def train(run: Run) -> Result:
    """Train one model through all of its boundaries; its losses, and what crossed the wire."""
    spec = run.spec()
    if run.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32: several times faster, and alike for all that is compared
    carrier = Carrier(spec)
    reference = Reference(spec, corpus_of(run.scale), carrier, run.device)
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    stopped = None
    try:
        for row in reference.train():
            if row["event"] == "step":
                steps.append(row)
            elif row["event"] == "eval":
                last = row["step"] == spec.steps
                off = reference.evaluate(codecs=False) if last or rounds_hard(spec) else row["loss"]
                evals.append({"step": row["step"], "loss": finite(row["loss"]), "loss_codec_off": finite(off)})
    except RunStopped as e:
        stopped = str(e)
    tokens, boundaries = len(steps) * run.scale.tokens_per_step, run.scale.layers - 1
    payload = {leg: carrier.payload_bytes[leg] / tokens / boundaries for leg in ("forward", "backward")}
    planned = boundary_bytes(spec)
    return {
        "loss": None if stopped else evals[-1]["loss"],
        "loss_codec_off": None if stopped else evals[-1]["loss_codec_off"],
        "stopped": stopped,
        "bytes_per_token": payload["forward"] + payload["backward"] + id_bytes(spec),
        "bytes_forward": payload["forward"] + id_bytes(spec),
        "bytes_backward": payload["backward"],
        "bytes_by_arithmetic": planned["forward"] + planned["backward"],
        "compute_seconds": median(row["seconds"] for row in steps) / run.scale.layers,
        "parameters": reference.parameters,
        "train_tokens": len(reference.corpus.train),
        "held_out_tokens": len(reference.corpus.held_out),
        "epochs": len(steps) * run.scale.batch / reference.batches.windows,
        "curve": smoothed(steps),
        "evals": evals,
    }


@cache
def corpus_of(scale: Scale) -> Corpus:
    """All held-out text, and the beginning of the rest. Once a process: finding the files takes a second."""
    corpus = prepare(_spec(scale, {}))
    front, _ = split_tail(corpus.train.shards, max(0, len(corpus.train) - scale.train_tokens))
    return replace(corpus, train=TokenStream(front, corpus.folder))


def rounds_hard(spec: RunSpec) -> bool:
    """Whether taking the codec off at evaluations may change their loss much; elsewhere only the last is done twice."""
    return parse_codec(spec.wire.forward).codec.for_evaluation().coarse


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def smoothed(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training loss in at most CURVE_POINTS points, each the mean of the steps since the last."""
    size = math.ceil(len(steps) / CURVE_POINTS)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [{"step": part[-1]["step"], "loss": finite(mean(row["loss"] for row in part))} for part in parts]


def _kept(path: Path) -> list[Result]:
    """The last line may have been cut off with the experiment: it is dropped."""
    lines, found = path.read_text(encoding="utf-8").splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found.append({"key": row["key"], "result": row["result"]})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                what = f"{path}:{number} is not a result of this experiment"
                raise UserError(what, "name another file with --keep", "not_a_result") from None
            path.write_text("".join(f"{whole}\n" for whole in lines[:-1]), encoding="utf-8")
    return found


class Bench:
    """Trains runs, each once, several at a time in processes of their own; `kept` outlives an interruption."""

    def __init__(self, workers: int, expected: int, kept: Path | None = None):
        self.expected, self.kept, self.started = expected, kept, time.monotonic()
        self.done: dict[str, Result] = {}
        self.trained = 0
        if kept is not None and kept.exists():
            self.done = {row["key"]: row["result"] for row in _kept(kept)}
            say(f"{kept} already has {plural(len(self.done), 'run')}")
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            # Spawned, not forked: torch's threads and CUDA do not survive a fork.
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self, runs: Sequence[Run]) -> list[Result]:
        """One result per run, in the order of `runs`."""
        new = {run.key(): run for run in runs if run.key() not in self.done}
        self.expected = max(self.expected, self.trained + len(new))
        if self._pool is None:
            for key, run in new.items():
                self._finish(key, run, train(run))
        else:
            futures = {self._pool.submit(train, run): key for key, run in new.items()}
            for future in as_completed(futures):
                self._finish(futures[future], new[futures[future]], future.result())
        return [self.done[run.key()] for run in runs]

    def _finish(self, key: str, run: Run, result: Result) -> None:
        self.done[key] = result
        self.trained += 1
        if self.kept is not None:
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "result": strict(result)}) + "\n")
        elapsed = time.monotonic() - self.started
        left = elapsed / self.trained * (self.expected - self.trained)
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.3f}"
        say(
            f"[{self.trained}/about {self.expected}] {duration(elapsed)}, about {duration(left)} left | "
            f"{run.recipe.name} lr {run.recipe.lr:g} seed {run.seed}: {loss}"
        )


def scaled(name: str, steps: int | None, seeds: int | None, workers: int | None) -> Scale:
    """A scale by name, with the user's changes."""
    scale = SCALES[name]
    return replace(scale, steps=steps or scale.steps, seeds=seeds or scale.seeds, workers=workers or scale.workers)
