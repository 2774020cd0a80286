"""Token ids for stage 0: batches are a pure function of the spec, so any step can be fed again."""

from __future__ import annotations

from collections.abc import Iterator

from protomodels_cli.codecs import pack_ids
from protomodels_cli.cost.traffic import id_bytes
from protomodels_cli.data.batches import Batches, held_out_windows
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


class Feed:
    def __init__(self, spec: RunSpec, corpus: Corpus):
        self._spec, self._width = spec, id_bytes(spec)
        self._batches = Batches(corpus.train, spec)
        self._held_out = [pack_ids(windows, self._width) for windows in held_out_windows(corpus.held_out, spec)]

    @property
    def steps(self) -> int:
        return self._spec.steps

    @property
    def microbatches(self) -> int:
        return self._spec.batch.microbatches

    @property
    def evaluation_microbatches(self) -> int:
        return len(self._held_out)

    def step(self, step: int) -> Iterator[pb.Feed]:
        for m in range(self._spec.batch.microbatches):
            ids = pack_ids(self._batches.microbatch(step, m), self._width)
            yield pb.Feed(step=step, microbatch=m, ids=ids)

    def evaluation(self, step: int) -> Iterator[pb.Feed]:
        for m, ids in enumerate(self._held_out):
            yield pb.Feed(step=step, microbatch=m, evaluation=True, ids=ids)
