"""A stage without neighbours: what it receives is random, what it sends is dropped. For its memory and its kernels."""

from __future__ import annotations

import numpy as np
import torch

from protomodels_cli.codecs import End, pack_ids
from protomodels_cli.cost.traffic import id_bytes
from protomodels_cli.protocol.messages import Leg, MessageKey
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.frames import Message
from protomodels_cli.worker.stage_work import StageWork

GRADIENT = 1e-4  # size of the random gradients


class Neighbours:
    """What a stage receives from both sides, packed."""

    def __init__(self, spec: RunSpec, index: int):
        self.spec, self.index, self.end = spec, index, End(spec)
        rows = spec.batch.size // spec.batch.microbatches
        self.shape = rows, spec.model.context, spec.boundary_width
        ids = np.random.default_rng(0).integers(0, spec.vocab_size, (rows, spec.model.context + 1))
        self.ids = pack_ids(ids, id_bytes(spec))

    def message(self, leg: Leg, step: int, microbatch: int) -> Message:
        ids = self.ids if leg == "forward" else b""
        if leg == "forward" and self.index == 0:
            return Message(leg, step, microbatch, 0, ids, b"")
        boundary = self.index if leg == "backward" else self.index - 1
        windows = torch.zeros((self.shape[0], self.shape[1] + 1), dtype=torch.int64)
        slot = self.end.slot(MessageKey(step, microbatch, boundary, leg), self.shape, torch.float32, windows)
        numbers = torch.randn(self.shape) * (1.0 if leg == "forward" else GRADIENT)
        return Message(leg, step, microbatch, 0, ids, self.end.pack(numbers, slot))


def messages(around: Neighbours, step: int, microbatches: int) -> dict[Leg, list[Message]]:
    return {leg: [around.message(leg, step, m) for m in range(microbatches)] for leg in ("forward", "backward")}


def take_step(work: StageWork, coming: dict[Leg, list[Message]], held: int) -> None:
    """The next step of a stage, with at most `held` microbatches in flight. Returns once the device is done."""
    n = work.spec.batch.microbatches
    doing, sent = work.begin("forward", work.step + 1, n), []
    while not doing.complete:
        while doing.entered < n and len(doing.flights) < held:
            sent += work.forward(doing, coming["forward"][doing.entered])
            work.transfers.pace()
        if doing.flights:
            sent += work.backward(doing, coming["backward"][doing.finished])
            work.transfers.pace()
    for message in sent:
        message.wait()
    work.loss_sum()
    work.prepare(1)
    work.decide(work.step + 1, True, 1e-5, 1.0)
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
