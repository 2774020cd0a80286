"""AQ-SGD: both ends keep every sample's last message; the first goes whole, later ones as C(x − last).

The cache is in the machine's own memory, wherever the stage computes: it has one entry for each sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from protomodels_cli.codecs.base import (
    LARGEST,
    NAME_BYTES,
    AtEnds,
    Codec,
    Extent,
    Feedback,
    Kept,
    Remembered,
    Slot,
    Surroundings,
    bounded_sum,
)
from protomodels_cli.codecs.fp32 import FP32
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")


@dataclass(frozen=True)
class AQSGD(Feedback):
    name, usage = "aqsgd", "+aqsgd"
    help = "forward only: send a sample's activations whole the first time, then C(x − last)"
    remembers_samples = memory_on_host = True
    needs_revisits = "AQ-SGD sends how a sample's activations have changed since the last epoch"

    def contradictions(self, around: Surroundings) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(around)
        if around.leg == "backward":
            yield (
                "AQ-SGD is for activations: the gradients of a sample are not alike from epoch to epoch",
                "use +aqsgd on the forward leg only, and for example int8 here",
            )
        elif around.sampling != "epochs":
            yield (
                f"{self.needs_revisits}, and data.sampling {around.sampling} does not revisit samples",
                "set data.sampling to epochs, or use another codec",
            )

    @property
    def offers_positions(self) -> bool:
        return False

    def without_positions(self) -> str:
        return "AQ-SGD sends new samples whole, without positions"

    def offered_positions(self, e: Extent) -> int:
        return 0

    def remembered(self, e: Extent) -> Remembered:
        names = Kept("U8", (e.samples, NAME_BYTES), at_most=True)
        cache = {"samples": names, "last": Kept(e.number, (e.samples, e.context, e.width), at_most=True)}
        return Remembered(cache, cache)

    def staged_bytes(self, e: Extent) -> AtEnds:
        step = e.microbatches * e.message_bytes
        return AtEnds(step, step)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x, (new, old) = message.clamp(-LARGEST, LARGEST), _split(slot)
        tensors = [x[new]] if new else []
        if old:
            tensors += self.inner.encode(bounded_sum(x[old], -_last(slot, old, x.device)), _rows(slot, old))
        self.decode(tensors, slot)
        return tensors

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        new, old = _split(slot)
        whole = torch.empty(slot.shape, dtype=slot.dtype, device=tensors[0].device)
        if new:
            whole[new] = tensors[0]
        if old:
            change = self.inner.decode(tensors[1 if new else 0 :], _rows(slot, old))
            whole[old] = bounded_sum(change, _last(slot, old, change.device))
        for sample, row in zip(slot.samples, whole.cpu(), strict=True):
            slot.memory.put(sample, row.clone())
        return whole

    def layout(self, slot: Slot) -> Layout:
        new, old = _split(slot)
        whole: Layout = [((len(new), *slot.shape[1:]), slot.dtype)] if new else []
        return whole + (self.inner.layout(_rows(slot, old)) if old else [])

    def for_evaluation(self) -> Codec:
        """What sends samples whole: those of an evaluation are all new."""
        return FP32()

    def saved(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Two tensors, however many samples are remembered: their names, and their messages in that order."""
        if not kept:
            return {}
        names = sorted(kept)
        raw = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(len(names), NAME_BYTES)
        return {"samples": torch.from_numpy(raw.copy()), "last": torch.stack([kept[n] for n in names])}

    def restored(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not saved:
            return {}
        names = [row.numpy().tobytes().hex() for row in saved["samples"]]
        return dict(zip(names, saved["last"], strict=True))


def _split(slot: Slot) -> tuple[list[int], list[int]]:
    """Rows whose sample is new, and rows whose sample was seen."""
    seen = [slot.memory.get(sample) is not None for sample in slot.samples]
    return [i for i, s in enumerate(seen) if not s], [i for i, s in enumerate(seen) if s]


def _last(slot: Slot, rows: list[int], device: torch.device) -> Tensor:
    last = [slot.memory.get(slot.samples[i]) for i in rows]
    return torch.stack([row for row in last if row is not None]).to(device)


def _rows(slot: Slot, rows: list[int]) -> Slot:
    return replace(slot, shape=(len(rows), *slot.shape[1:]), samples=())


CODECS = (AQSGD,)
