"""A snapshot opened for reading: its parts, the tokenizer, and what is known of how it was trained. Needs no torch.

With a coordinator at work in the directory the newest snapshot may be dropped while it is being opened: then there is a
newer one. Once it is open, all of it can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from protomodels_cli.coordinator import contributions
from protomodels_cli.coordinator.contributions import Contribution
from protomodels_cli.cost.saving import SHORTEST
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.kept import CORPUS, TOKENIZER
from protomodels_cli.data.prepare import cached
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.export.runs import Described, Key, NotUsable, Run, run_at
from protomodels_cli.export.shelves import NO_ROOM
from protomodels_cli.huggingface.tokenizer import RunTokenizer
from protomodels_cli.observe.metrics import rows_from_last
from protomodels_cli.quantities import duration
from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile
from protomodels_cli.spec.schema import RunSpec, SnapshotSpec

START = 0, 0  # what a checkpoint was cut into: before all lineages, and every one of them may begin there
TRIES = 20  # to open a snapshot before it is dropped


@dataclass(frozen=True)
class Part:
    """One stage's share of the snapshot."""

    path: str
    sha256: str
    _file: Callable[[], AbstractContextManager[SafetensorsFile]]
    _refuse: Callable[[str], UserError]

    @contextmanager
    def open(self) -> Iterator[SafetensorsFile]:
        """With the right bytes, or UserError."""
        with ExitStack() as closing:
            try:
                file = closing.enter_context(self._file())
                found = file.sha256()
            except FileNotFoundError:
                raise self._refuse(f"{self.path} is gone: the snapshot was dropped meanwhile") from None
            except SafetensorsError as e:
                raise self._refuse(f"{self.path} is damaged: {e}") from None
            except OSError as e:
                if e.errno in NO_ROOM:  # for what is fetched from a store
                    raise
                raise self._refuse(f"{self.path} cannot be read: {e.strerror}") from None
            if found != self.sha256:
                raise self._refuse(f"{self.path} is damaged (hash mismatch)")
            yield file


@dataclass(frozen=True)
class Facts:
    """What is known of a snapshot's training; None where it is not."""

    loss: float | None = None  # of the last step
    eval_loss: float | None = None  # held out, the last that was measured
    eval_step: int | None = None
    corpus: dict[str, Any] | None = None
    sent: tuple[int, int] | None = None  # bytes over all boundaries, forward and backward
    work: Mapping[str, Contribution] = field(default_factory=dict)  # of the run so far, by peers' names


@dataclass(frozen=True)
class Source:
    place: str
    spec: RunSpec
    base: Path | None  # what the spec's paths are relative to, where that is this machine
    step: int
    lineage: int | None  # None: of the reference, which has but one
    layers: tuple[int, ...]  # per stage
    parts: tuple[Part, ...]
    tokenizer: RunTokenizer | None  # None: the data were ids
    facts: Facts
    _opened: ExitStack = field(repr=False)

    @property
    def tokenizer_files(self) -> dict[str, str]:
        """Name → content, as Hugging Face's AutoTokenizer reads them."""
        return {} if self.tokenizer is None else self.tokenizer.files(self.spec.model.context)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()


def open_source(place: str | Path, step: int | None = None, scratch: Path | None = None) -> Source:
    """The newest complete snapshot, or that of a step, of a run directory or of a store's copy of one. `scratch`: the
    folder in which parts from a store lie while they are read. Raises UserError."""
    run, only = run_at(str(place), scratch)
    tokenizer = _tokenizer(run)
    for _ in range(TRIES):
        saved = [key for key in run.saved() if only in (None, key)]
        if not saved:
            continue  # it may have been dropped while it was looked at
        key = _choose(run, saved, step)
        with ExitStack() as opened:
            try:
                described = run.describe(key)
                parts = _open_parts(run, key, described, opened)
            except FileNotFoundError as e:
                if key in run.saved():
                    raise _refusal(run, key, f"{_name(run, e)} is missing") from None
                continue
            except NotUsable as e:
                raise _refusal(run, key, f"{run.shelf.place}/{e}") from None
            facts = _facts(run, key, described)
            lineage, at = key
            layers = described.layers
            kept = opened.pop_all()
            return Source(str(place), run.spec, run.base, at, lineage or None, layers, parts, tokenizer, facts, kept)
    when = _first_saved(run.spec.snapshots)
    raise UserError(
        f"nothing was saved yet: {run.shelf.place} has no complete snapshot",
        f"export again when there is one; the first is saved {when}",
        "nothing_saved",
    )


def _first_saved(s: SnapshotSpec) -> str:
    times = ([f"after step {s.interval}"] if s.interval else []) + ([f"after {s.every}"] if s.every else [])
    if s.interval is None and s.every is None:
        return f"{duration(SHORTEST)} or one step after the beginning, whichever is longer"
    return " or ".join(times) or "at the end of the run (snapshots.interval is 0)"


def _choose(run: Run, saved: list[Key], step: int | None) -> Key:
    for key in saved:
        if step in (None, key[1]):
            return key
    steps = ", ".join(str(at) for _, at in reversed(saved))
    raise OptionError(
        f"--step {step}: {run.shelf.place} has no complete snapshot of that step",
        f"use {'one of ' * (len(saved) > 1)}{steps}, or leave out --step for the newest",
        "no_such_snapshot",
    )


def _open_parts(run: Run, key: Key, described: Described, opened: ExitStack) -> tuple[Part, ...]:
    parts = []
    for part in described.parts:
        try:
            opener = part.shelf.opener(part.path, opened)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise NotUsable(part.path, f"cannot be read: {e.strerror}") from None
        except SafetensorsError as e:
            raise NotUsable(part.path, f"is damaged: {e}") from None
        parts.append(Part(f"{part.shelf.place}/{part.path}", part.sha256, opener, partial(_refusal, run, key)))
    return tuple(parts)


def _name(run: Run, missing: FileNotFoundError) -> str:
    return str(missing.filename or f"{run.shelf.place}/{missing.args[0]}")


def _refusal(run: Run, key: Key, what: str) -> UserError:
    others = [str(at) for _, at in run.saved() if at != key[1]]
    fix = f"export another snapshot with --step {others[0]}" if others else "export again after the next snapshot"
    return UserError(what, f"{fix}, or the copy in the store that snapshots.copy_to names", "snapshot_damaged")


def _tokenizer(run: Run) -> RunTokenizer | None:
    spec = run.spec.tokenizer
    if spec.kind == "none":
        return None
    if spec.kind == "bytes":
        return RunTokenizer.of_bytes()
    try:
        return RunTokenizer.of_json(run.shelf.read(TOKENIZER).decode())
    except FileNotFoundError:
        text = _cached_tokenizer(run)
    except (ValueError, DataError):
        text = None
    if text is None:
        raise UserError(
            f"{run.shelf.place}/{TOKENIZER} is missing or damaged",
            f"put the {TOKENIZER} that the run was tokenised with there; the token cache has it",
            "tokenizer_missing",
        )
    return RunTokenizer.of_json(text)


def _cached_tokenizer(run: Run) -> str | None:
    """Of a run that began before run directories held the tokenizer."""
    if run.base is None:
        return None
    try:
        corpus = cached(run.spec, run.base)
        return None if corpus is None else (corpus.folder / TOKENIZER).read_text(encoding="utf-8")
    except (OSError, DataError):
        return None


def _facts(run: Run, key: Key, described: Described) -> Facts:
    mark = described.mark
    loss, held_out = _losses(run.metrics, key)
    if held_out is None and mark is not None and mark.eval_loss is not None:
        held_out = mark.eval_loss, None
    try:
        corpus = dict(json.loads(run.shelf.read(CORPUS)))
    except (FileNotFoundError, ValueError, TypeError):
        corpus = None
    eval_loss, eval_step = held_out or (None, None)
    sent = None if mark is None else (mark.forward_bytes, mark.backward_bytes)
    work = {} if run.metrics is None or mark is None else contributions.read(run.metrics).sums()
    return Facts(loss, eval_loss, eval_step, corpus, sent, work)


def _losses(metrics: Path | None, key: Key) -> tuple[float | None, tuple[float, int | None] | None]:
    """The loss of the snapshot's step, and the last held-out one up to there with its step."""
    loss: float | None = None
    held_out: tuple[float, int | None] | None = None
    lineage, step = key
    try:
        for row in rows_from_last(metrics) if metrics else ():
            if not (row.get("lineage", 0) <= lineage or key == START) or not row["step"] <= step:
                continue
            if row["event"] == "eval" and held_out is None:
                held_out = float(row["loss"]), int(row["step"])
            if row["event"] == "step" and row["step"] == step and loss is None:
                loss = float(row["loss"])
            if loss is not None and held_out is not None:
                break
    except (OSError, KeyError, TypeError, ValueError):  # damaged, or another program's
        pass
    return loss, held_out
