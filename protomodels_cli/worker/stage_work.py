"""What a stage computes: microbatches, a step's two halves, the move to a new basis. No threads, no sockets.

The same operations in the same order as the reference's; only who calls differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protomodels_cli.codecs import End, unpack_ids
from protomodels_cli.cost.activations import Recompute
from protomodels_cli.cost.traffic import id_bytes
from protomodels_cli.errors import first_line
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.shape import Shape, Slice
from protomodels_cli.model.stage import InFlight, Layout
from protomodels_cli.model.state import basis_in, section_of
from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.messages import BadMessage, Leg, MessageKey
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.frames import Message
from protomodels_cli.worker.orders import WrongOrder
from protomodels_cli.worker.pinning import HostMemory
from protomodels_cli.worker.sizes import Sizes
from protomodels_cli.worker.transfers import Clock, transfers_for


@dataclass
class Pass:
    """A step or an evaluation on its way through this stage."""

    leg: Leg  # forward for a step, evaluation for an evaluation
    step: int
    microbatches: int
    entered: int = 0  # microbatches whose forward was done
    finished: int = 0  # … and whose backward was done too (of an evaluation: whose forward was)
    flights: dict[int, InFlight] = field(default_factory=dict)
    tokens: int = 0

    @property
    def complete(self) -> bool:
        return self.finished == self.microbatches


@dataclass(frozen=True)
class Pending:
    """What is to be sent once the device is done with it. Raises BadMessage in place of what came of a bad message."""

    leg: Leg | None
    wait: Callable[[], Any]


class StageWork:
    """A stage as the seed makes it with this basis, or as it was saved after a step."""

    def __init__(
        self,
        spec: RunSpec,
        slice_: Slice,
        basis: Basis | None,
        device: torch.device | Layout,
        saved: Mapping[str, Tensor] | None = None,
        step: int = 0,
        recompute: Recompute = "none",
        memory: HostMemory | None = None,
    ):
        self.spec, self.slice = spec, slice_
        self.step = step  # the last one whose outcome it knows
        self.prepared = 0  # the generation in which it has the gradients of the step after that; 0: it has not
        self.last_report: tuple[int, dict[str, Any], Basis | None] | None = (
            None  # on the subspace, and after which step
        )
        if saved is not None:
            basis = basis_in(saved)
        self.dtype = Shape.of(spec).dtype
        self.trainer = StageTrainer(spec, slice_, basis, device, recompute, draw=saved is None)
        self.stage = self.trainer.stage
        self.device = self.stage.device  # of messages
        # One for each neighbour: what comes from it and goes to it passes here.
        self.previous = None if slice_.is_first else End(spec)
        self.next = None if slice_.is_last else End(spec)
        self.transfers, self.clock = transfers_for(self.stage.devices, memory), Clock(self.device)
        self.sizes: dict[Leg, Sizes] = {"forward": Sizes(), "backward": Sizes()}  # of what arrives
        self._arrived: dict[Leg, list[Tensor]] = {"forward": [], "backward": []}  # … in the step at hand
        self._loss = torch.zeros((), dtype=torch.float64, device=home_of_float64(self.device))
        if saved is not None:
            self._load(saved)
        self.not_compiled = self._warm_up()

    def _warm_up(self) -> str | None:
        """Everything once, with zeros: first calls are slow. Returns why something could not be compiled, if so."""
        rows, columns = self.spec.batch.size // self.spec.batch.microbatches, self.spec.model.context
        problem = self.stage.warm_up(rows, columns)
        if self.ends and self.stage.running.is_compiled:
            try:
                self._cross((rows, columns, self.spec.boundary_width))
                for end in self.ends.values():
                    end.compiled = True
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                problem = first_line(error)
        return problem

    def _cross(self, shape: tuple[int, int, int]) -> None:
        """Zeros over a boundary and back, both ends of which are here."""
        before, behind = End(self.spec), End(self.spec)
        before.compiled = behind.compiled = True
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        windows = torch.zeros((shape[0], shape[1] + 1), dtype=torch.int64)
        ways: list[tuple[Leg, End, End]] = [("forward", before, behind), ("backward", behind, before)]
        for step, (leg, sender, receiver) in product(before.first_steps(), ways):
            slot = sender.slot(MessageKey(step, 0, 0, leg), shape, self.dtype, windows)
            self.transfers.receive(receiver, self.transfers.send(sender, zeros, slot)(), slot)
        self.transfers.check()

    def _load(self, saved: Mapping[str, Tensor]) -> None:
        self.trainer.load(saved)
        for side, end in self.ends.items():
            end.load(section_of(saved, f"codecs/{side}"), self.device)

    def copy_state(self) -> Callable[[], dict[str, Tensor]]:
        """What waits until the stage's whole state is copied to this machine's memory, and returns it."""
        return self.transfers.copy(self.trainer.state(self.codec_state()))

    @property
    def basis_version(self) -> int:
        return 0 if self.stage.basis is None else self.stage.basis.version

    def abandon(self) -> None:
        """Forget whatever was done for a step that will be done again."""
        self.prepared = 0
        for arrived in self._arrived.values():
            arrived.clear()
        self.transfers.forget()
        self.trainer.abandon()
        for end in self.ends.values():
            end.decide(apply=False)

    def begin(self, leg: Leg, step: int, microbatches: int) -> Pass:
        self.abandon()
        if leg == "forward":
            self.trainer.begin(step)
        self._loss.zero_()
        return Pass(leg, step, microbatches)

    def forward(self, work: Pass, message: Message) -> list[Pending]:
        """One microbatch's forward; on the last stage its loss and backward too. Returns what is to be sent."""
        windows = self._windows(message)
        tokens, targets = windows[:, :-1], windows[:, 1:]
        received = None
        if not self.slice.is_first:
            received = self._received(self.previous, message, (*tokens.shape, self.spec.boundary_width), windows)
        work.entered += 1
        if work.leg == "evaluation":
            return self._evaluate(work, message, windows, received)
        flight = self.stage.run_forward(tokens, received)
        if not self.slice.is_last:
            work.flights[message.microbatch] = flight
            return [self._message("forward", work, message, flight.output, windows)]
        loss, gradient = self.stage.run_loss(flight, targets, self.stage.loss_scale)
        self._loss += loss
        work.tokens += targets.numel()
        work.finished += 1
        if gradient is None:
            return []
        return [self._message("backward", work, message, gradient, None)]

    def backward(self, work: Pass, message: Message) -> list[Pending]:
        flight = work.flights.pop(message.microbatch, None)
        if flight is None:
            raise BadMessage(f"a gradient of microbatch {message.microbatch}, which was not sent yet")
        gradient = self.stage.run_backward(flight, self._received(self.next, message, flight.output.shape, None))
        work.finished += 1
        if gradient is None:
            return []
        return [self._message("backward", work, message, gradient, None)]

    def _evaluate(self, work: Pass, message: Message, windows: Tensor, received: Tensor | None) -> list[Pending]:
        tokens, targets = windows[:, :-1], windows[:, 1:]
        x = self.stage.evaluate(tokens, received)
        work.finished += 1
        if not self.slice.is_last:
            return [self._message("evaluation", work, message, x, windows)]
        self._loss += self.stage.evaluate_loss(x, targets)
        work.tokens += targets.numel()
        return []

    def loss_sum(self) -> float:
        """Of the pass that is complete. Waits for the device."""
        self.transfers.check()
        return float(self._loss)

    def _windows(self, message: Message) -> Tensor:
        columns = self.spec.model.context + 1
        windows: np.ndarray = unpack_ids(message.ids, id_bytes(self.spec), columns, self.spec.vocab_size)
        rows = self.spec.batch.size // self.spec.batch.microbatches
        if not 1 <= len(windows) <= rows or (message.leg == "forward" and len(windows) != rows):
            raise BadMessage(f"a microbatch of {len(windows)} windows where {rows} belong")
        return self.transfers.upload(windows)

    def _received(self, end: End | None, message: Message, shape: Sequence[int], windows: Tensor | None) -> Tensor:
        assert end is not None
        self.clock.turn("wire")
        boundary = self.slice.index if end is self.next else self.slice.index - 1
        key = MessageKey(message.step, message.microbatch, boundary, message.leg)
        received = self.transfers.receive(end, message.payload, end.slot(key, shape, self.dtype, windows))
        if message.leg != "evaluation":  # read once a step: nothing waits for it here
            self._arrived[message.leg].append(torch.linalg.vector_norm(received) / math.sqrt(received.numel()))
        self.clock.turn("compute")
        return received

    def _message(self, leg: Leg, work: Pass, cause: Message, tensor: Tensor, windows: Tensor | None) -> Pending:
        """What follows from the message `cause`, for the next stage or (backward) the one before."""
        self.clock.turn("wire")
        end, boundary = (self.previous, self.slice.index - 1) if leg == "backward" else (self.next, self.slice.index)
        assert end is not None
        key = MessageKey(work.step, cause.microbatch, boundary, leg)
        wait = self.transfers.send(end, tensor.detach(), end.slot(key, tensor.shape, self.dtype, windows))
        ids = b"" if leg == "backward" else cause.ids
        step, version = work.step, self.basis_version
        self.clock.turn("compute")
        return Pending(leg, lambda: Message(leg, step, cause.microbatch, version, ids, wait()))

    @property
    def ends(self) -> dict[str, End]:
        return {side: end for side, end in (("previous", self.previous), ("next", self.next)) if end is not None}

    def codec_state(self) -> dict[str, Tensor]:
        """What the codecs of both boundaries remember."""
        return {f"{side}/{name}": t for side, end in self.ends.items() for name, t in end.state().items()}

    def prepare(self, generation: int) -> dict[str, float]:
        """The first half of a commit: gradients are kept; their squared norms go to the coordinator."""
        self.prepared = generation
        norms = self.trainer.prepare()
        for leg, arrived in self._arrived.items():
            self.sizes[leg].see(torch.stack(arrived).tolist() if arrived else [])
            arrived.clear()
        return norms

    def decide(self, step: int, apply: bool, lr: float, clip: float) -> None:
        """The second half of a commit: the step is taken or skipped, and codecs keep or drop what they learnt. Raises
        WrongOrder for any other step than the one that was prepared."""
        if not self.prepared or step != self.step + 1:
            has = f"the gradients of step {self.step + 1}" if self.prepared else f"no gradients after step {self.step}"
            raise WrongOrder(f"a decision on step {step} where this stage has {has}")
        self.step, self.prepared = step, 0
        self.transfers.before_change()
        self.trainer.decide(step, apply, lr, clip)
        for end in self.ends.values():
            end.decide(apply)
        for size in self.sizes.values():
            size.decide(apply)
        self.transfers.expect(lambda: self.trainer.state(self.codec_state()))

    def report_subspace(self) -> bool:
        """Whether the last step ended a gathering of gradients, on the last stage; `last_report` has the result."""
        if not self.slice.is_last or not steps.reports(self.spec.subspace, self.step):
            return False
        self.last_report = self.step, *(self.trainer.report(self.step) or ({}, None))
        return True

    def switch_basis(self, new: Basis) -> None:
        self.transfers.before_change()
        self.trainer.switch_basis(new)
        for end in self.ends.values():
            end.reset()
