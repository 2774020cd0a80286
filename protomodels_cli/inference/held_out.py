"""A run's own held-out windows, so that its model is scored on exactly what it was scored on in training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protomodels_cli.data.batches import held_out_windows
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.work import Show, in_silence
from protomodels_cli.export.source import Source


class HeldOut:
    """`most` windows of `context` tokens; by default as many and as long as the spec says."""

    def __init__(self, source: Source, most: int | None = None, context: int | None = None, show: Show = in_silence):
        if source.base is None:
            raise DataError(
                f"{source.place} is a copy without the run's data",
                "name the run directory, or a text with --data",
                "no_data",
            )
        corpus, kept = prepare(source.spec, source.base, show=show), source.facts.corpus
        # Without a hash (a run of older days, a damaged file) nobody knows, as without the file.
        if kept is not None and kept.get("sha256", corpus.sha256) != corpus.sha256:
            raise DataError(
                "the run's data have changed since it began: what is held out now was trained on, in part",
                "restore the files as they were, or name another text with --data",
                "data_changed",
            )
        self._stream = corpus.held_out
        lengths = source.spec.model.model_copy(update={"context": context or source.spec.model.context})
        counts = source.spec.eval.model_copy(update={"windows": most or source.spec.eval.windows})
        self._spec = source.spec.model_copy(update={"model": lengths, "eval": counts})

    @property
    def windows(self) -> int:
        """How many there are."""
        return min(self._spec.eval.windows, (len(self._stream) - 1) // self._spec.model.context)

    def batches(self) -> Iterator[np.ndarray]:
        return held_out_windows(self._stream, self._spec)
