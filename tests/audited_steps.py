"""Stage-steps as peers take them, recorded, and recomputed elsewhere by the very function that an audit uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from faults_in_transit import as_sent, perturbed
from safetensors.torch import save_file

from protomodels_cli.codecs import End
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.protocol.audit import Compared, noise_between
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import auditing
from protomodels_cli.worker.comparing import WIDER, compare
from protomodels_cli.worker.stage_work import StageWork

STAGES, WARM_UP, LR = 3, 4, 3e-3
# 16,384 numbers a message. Over int4 the lie of 1 % of them leaves few: in 4,096 it is below the limit once in 13 times
# (docs/audit.md).
BATCH = {"size": 16, "microbatches": 2}
LIE = (0.01, 0.1)  # of the numbers of every message, and by how much they are larger
MODEL = {"layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 256, "context": 64}


def a_spec(wire: str, **compute: Any) -> RunSpec:
    """`compute`: how this machine computes. No bit of what crosses a boundary is told by it."""
    wires = {"forward": wire, "backward": wire}
    return make_spec(
        stages=STAGES, steps=100, model=MODEL, subspace={"k": 32}, batch=BATCH, wire=wires, compute=compute
    )


@dataclass
class Found:
    """Over all comparisons."""

    compared: list[Compared] = field(default_factory=list)
    off: float = 0.0  # the largest difference of numbers, of what a lone number may be off
    mean_off: float = 0.0  # the largest root mean square of a message's differences, of the allowance

    @property
    def wild(self) -> tuple[float, float]:
        """The least and the largest share of what makes a lie of a message."""
        shares = [c.wild / c.limit for c in self.compared]
        return min(shares), max(shares)

    def __str__(self) -> str:
        each = ", ".join(f"{c.leg} {c.wild} of {c.numbers}" for c in self.compared[-4:])
        return (
            f"{len(self.compared)} messages: wild numbers {self.wild[0]:.3f} to {self.wild[1]:.3f} of what makes a lie "
            f"(at the end: {each}); off by at most {self.off:.3f} of the margin of a number, {self.mean_off:.3f} of "
            "the allowance in the mean, with what the codec rounds"
        )


class Peers:
    """All stages of a run, on one device."""

    def __init__(self, spec: RunSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.arithmetic = choose(spec.compute, device)
        self.arithmetic.prepare(device)
        basis = initial_basis(spec.model.width, spec.subspace.k, spec.seed)
        self.stages = [StageWork(spec, layers, basis, device) for layers in slices(spec)]
        self._feed = Feed(spec, corpus_of(spec))

    def take_step(self, step: int) -> list[pb.Crossing]:
        """What crossed each boundary with the first microbatch."""
        passes = [stage.begin("forward", step, self.spec.batch.microbatches) for stage in self.stages]
        recorded: list[pb.Crossing] = []
        self.ids = b""
        for fed in self._feed.step(step):
            message = Message("forward", step, fed.microbatch, 0, fed.ids, b"")
            crossings = [pb.Crossing() for _ in self.stages[1:]]
            for i, stage in enumerate(self.stages):
                [sent] = stage.forward(passes[i], message)
                message = sent.wait()
                if i < STAGES - 1:
                    crossings[i].forward.CopyFrom(carried(message))
            for i in reversed(range(STAGES - 1)):
                crossings[i].backward.CopyFrom(carried(message))
                sent_back = self.stages[i].backward(passes[i], message)
                message = sent_back[0].wait() if sent_back else message
            recorded = recorded or crossings
            self.ids = self.ids or fed.ids
        for stage in self.stages:
            stage.loss_sum()
            stage.prepare(1)
        for stage in self.stages:
            stage.decide(step, True, LR, 1.0)
        return recorded

    def save(self, folder: Path) -> list[Path]:
        paths = [folder / f"stage-{i}.safetensors" for i in range(STAGES)]
        for stage, path in zip(self.stages, paths, strict=True):
            save_file({name: t.contiguous() for name, t in stage.copy_state()().items()}, path)
        return paths


def carried(message: Message) -> pb.Carried:
    payload = bytes(message.payload or b"")
    return pb.Carried(basis_version=message.basis_version, ids=message.ids, payload=payload, poison=not payload)


@contextmanager
def liars(patch: pytest.MonkeyPatch, share: float, by: float) -> Iterator[None]:
    with patch.context() as patched:
        as_sent(patched, partial(perturbed, share=share, by=by))
        yield


def audit(
    peers: Peers,
    by: RunSpec,
    device: torch.device,
    steps: int,
    folder: Path,
    patch: pytest.MonkeyPatch,
    lie: tuple[float, float] | None = None,
) -> Found:
    """Peers take so many steps, and somebody with another machine recomputes every stage of each."""
    found, spec = Found(), by
    noise = noise_between(peers.arithmetic.name, choose(by.compute, device).name)

    def and_note(end: End, slot: Any, right: torch.Tensor, sent: Any, allowed: float) -> Compared:
        assert allowed == noise
        said = end.twin().unpack(sent, slot, right.device)
        size = right.double().square().mean(-1, keepdim=True).sqrt()
        size = torch.maximum(size, 0.1 * right.double().square().mean().sqrt())
        off = (said.double() - right.double()) / (size * noise)
        found.off = max(found.off, float(off.abs().max()) / (2 * WIDER))
        found.mean_off = max(found.mean_off, float(off.square().mean().sqrt()))
        return compare(end, slot, right, sent, allowed)

    done = peers.stages[0].step
    for step in range(done + 1, done + 1 + steps):
        paths = peers.save(folder)
        if lie is None:
            crossings = peers.take_step(step)
        else:
            with liars(patch, *lie):
                crossings = peers.take_step(step)
        choose(by.compute, device).prepare(device)
        for i, layers in enumerate(slices(spec)):
            frames = pb.Audited(ids=peers.ids if i == 0 else b"")
            if i > 0:
                frames.before.CopyFrom(crossings[i - 1])
            if i < STAGES - 1:
                frames.behind.CopyFrom(crossings[i])
            restore = pb.Restore(lineage=1, step=step - 1)
            asked = pb.Audit(audit=1, step=step, microbatch=0, noise=noise, stage=pb.Assignment(stage=i))
            asked.stage.restore.CopyFrom(restore)
            with patch.context() as patched:
                patched.setattr(auditing, "compare", and_note)
                found.compared += auditing.recomputed(asked, frames, spec, layers, device, paths[i])  # type: ignore[arg-type]
        peers.arithmetic.prepare(peers.device)
    return found
