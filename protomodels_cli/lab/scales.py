"""The sizes that experiments are done at: model, length and text, which all runs of a sweep share.

No token is trained on twice. The text's end is held out, in two parts that are whole documents: rates are tuned on the
first, and the second is what is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from protomodels_cli.data.prepare import Corpus, prepare
from protomodels_cli.data.shards import TokenStream, split_tail
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.lab.results import say
from protomodels_cli.spec import spec_from

LOOK_BACK = 1 << 20  # tokens within which a document is expected to end


@dataclass(frozen=True)
class Scale:
    """A stage for every segment, so that every segment's end is a boundary."""

    name: str
    width: int
    heads: int
    kv_heads: int
    layers: int
    segments: int
    context: int
    vocabulary: int
    batch: int
    steps: int
    ks: tuple[int, int]  # of the subspace forms: for about 30 × and 100 × fewer bytes than fp32
    eval_windows: int  # of each held-out part
    seeds: int  # of the rows that matter; the others have one
    trials: int  # of tuning, for every family
    workers: int  # runs side by side
    source: str = "python"  # data.source
    files: tuple[str, ...] = ()
    text: int | None = None  # bytes of it, at most
    microbatches: int = 1
    loss_chunk: int = 1024
    evals: int = 8  # over a run

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step


_GPU = Scale(
    name="gpu",
    width=512,
    heads=8,
    kv_heads=8,
    layers=8,
    segments=4,
    context=512,
    vocabulary=8192,
    batch=64,
    steps=800,
    ks=(64, 16),
    eval_windows=512,
    seeds=3,
    trials=5,
    workers=3,
    loss_chunk=8192,
)
SCALES = {
    "cpu": Scale(
        name="cpu",
        width=64,
        heads=4,
        kv_heads=4,
        layers=4,
        segments=2,
        context=64,
        vocabulary=512,
        batch=8,
        steps=200,
        ks=(8, 2),
        eval_windows=64,
        evals=4,
        seeds=2,
        trials=3,
        workers=2,
        text=1_000_000,
    ),
    "gpu": _GPU,
    "gpu-1024": replace(
        _GPU, name="gpu-1024", width=1024, heads=16, kv_heads=16, steps=1600, ks=(128, 32), seeds=1, trials=0
    ),
}


def scaled(name: str, text: str | None = None, **changes: Any) -> Scale:
    """A scale by name, with the user's changes; those that are None are none."""
    if name not in SCALES:
        raise OptionError(
            f"--scale {name}: there is no such scale", f"use {', '.join([*SCALES][:-1])} or {[*SCALES][-1]}", "scale"
        )
    scale = replace(SCALES[name], **{key: value for key, value in changes.items() if value is not None})
    return with_text(scale, text)


def with_text(scale: Scale, text: str | None) -> Scale:
    """None: the scale's own."""
    if text is None:
        return scale
    return replace(scale, source="bin" if text.endswith(".bin") else "files", files=(text,), text=None)


def data_sections(scale: Scale) -> dict[str, Any]:
    """`data` and `tokenizer` of a spec."""
    data: dict[str, Any] = {"source": scale.source, "val_fraction": 0.01}
    if scale.files:
        data["files"] = list(scale.files)
    if scale.text is not None:
        data["max_bytes"] = scale.text
    kind = "none" if scale.source == "bin" else "bytes" if scale.vocabulary == 256 else "bpe"
    return {"data": data, "tokenizer": {"kind": kind, "vocab_size": scale.vocabulary}}


@dataclass(frozen=True)
class Text:
    corpus: Corpus  # the training part, and as held out the one that is reported
    tuning: TokenStream

    @property
    def sha256(self) -> str:
        return self.corpus.sha256


def text_of(scale: Scale) -> Text:
    """The scale's text. Raises where some of it would have to be read twice."""
    text = _text(data_key(scale))
    windows = (len(text.corpus.train) - 1) // scale.context
    if windows < scale.steps * scale.batch:
        raise UserError(
            f"the text has {len(text.corpus.train)} tokens to train on, and {scale.steps} steps of "
            f"{scale.tokens_per_step} tokens need {scale.tokens + 1}: no token is to be seen twice",
            "give more text with --text FILE, or train for fewer --steps",
            "text_too_short",
        )
    return text


def data_key(scale: Scale) -> Scale:
    """What of a scale its text depends on, so that scales which share it prepare it once."""
    return replace(SCALES["cpu"], steps=0, **{name: getattr(scale, name) for name in _OF_THE_TEXT})


_OF_THE_TEXT = ("context", "vocabulary", "eval_windows", "source", "files", "text")


@cache
def _text(scale: Scale) -> Text:
    model = {"layers": 1, "width": 16, "heads": 1, "context": scale.context}
    told: set[str] = set()

    def show(doing: str, done: float, total: float | None) -> None:
        if doing not in told:
            told.add(doing)
            say(f"text: {doing} …")

    corpus = prepare(spec_from({"steps": 1, "model": model, **data_sections(scale)}), Path(), show=show)
    tokenizer = corpus.tokenizer()
    end = None if tokenizer is None else tokenizer.end_id
    shards, whole = corpus.train.shards, corpus.train
    parts = []
    for _ in ("reported", "tuned on"):
        least = len(whole) - scale.eval_windows * scale.context - 1
        cut = document_end(whole, max(0, least), end)
        shards, tail = split_tail(shards, len(whole) - cut)
        parts.append(TokenStream(tail, corpus.folder))
        whole = TokenStream(shards, corpus.folder)
    report, tuning = parts
    return Text(replace(corpus, train=whole, held_out=report), tuning)


def document_end(stream: TokenStream, position: int, end_id: int | None) -> int:
    """Where the last document before a position ends; the position itself where none does nearby."""
    start = max(0, position - LOOK_BACK)
    ids = stream.read(start, position - start) if end_id is not None and position > start else np.empty(0)
    ends = np.flatnonzero(ids == end_id)
    return start + int(ends[-1]) + 1 if len(ends) else position
