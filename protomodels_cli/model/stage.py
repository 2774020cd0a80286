"""A stage: a contiguous slice of the layers, and the work it does on one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protomodels_cli.errors import first_line
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.basis import Basis, hash_of
from protomodels_cli.model.init import initialise
from protomodels_cli.model.llama import Multiplied, Running, StageModules, rotary
from protomodels_cli.model.loss import loss_and_gradient, loss_sum
from protomodels_cli.model.operators import EAGER, compiled
from protomodels_cli.model.shape import Shape, Slice
from protomodels_cli.model.t_fixed import TFixed
from protomodels_cli.protocol.messages import MessageKey
from protomodels_cli.protocol.t_fixed import VERSION
from protomodels_cli.spec.schema import RunSpec


def t_fixed_of(spec: RunSpec, device: torch.device | str = "cpu") -> TFixed:
    table = spec.subspace.t_fixed
    return TFixed(spec.vocab_size, spec.model.width, table.scale, table.seed, device)


class Carry(Protocol):
    """How messages cross the boundaries of a run."""

    def __call__(self, message: Tensor, key: MessageKey, windows: Tensor | None = None) -> Tensor:
        """What the receiver decodes of a message. `windows`: the token ids of a forward message's samples."""
        ...

    def decide(self, apply: bool) -> None:
        """A step was applied or skipped: codecs keep or drop what they learnt in it."""
        ...

    def reset(self) -> None:
        """The basis has moved: codecs forget what they remember in old coordinates."""
        ...

    def state(self, stage: int) -> dict[str, Tensor]:
        """The codecs' memories at a stage's ends of its boundaries."""
        ...


@dataclass(frozen=True)
class Sync:
    """What all stages must agree on, to the byte."""

    basis_version: int
    basis_sha256: str
    t_fixed_version: int
    t_fixed_sha256: str


@dataclass
class InFlight:
    """A microbatch between its forward and its backward on one stage."""

    tokens: Tensor
    received: Tensor | None  # the message it came from, a leaf; none on the first stage
    output: Tensor  # the message it became; on the last stage, the stream before the head


Recompute = Literal["none", "block", "stage"]


class Stage(StageModules):
    """Layers `slice.layers` of the model, with the embedding on the first stage and the head on the last."""

    def __init__(
        self,
        spec: RunSpec,
        slice_: Slice,
        basis: Basis | None,
        device: torch.device | str = "cpu",
        recompute: Recompute = "none",
        draw: bool = True,
    ):
        """`draw`: weights from the seed; otherwise they are to be loaded."""
        with torch.device(device):
            super().__init__(Shape.of(spec), slice_, spec.form(None if basis is None else basis.copy_to(device)))
        self.loss_chunk, self._message_width = spec.compute.loss_chunk, spec.boundary_width
        self.t_fixed = t_fixed_of(spec, device) if spec.form.has_basis else None
        self.on_release: Callable[[Tensor], None] | None = None  # is given ∂loss/∂x there, per microbatch
        self.recompute = recompute
        self.arithmetic = choose(spec.compute, self.device)
        self.arithmetic.prepare(self.device)
        cos, sin = rotary(spec.model.context, self.shape.head_dim, self.shape.rope_theta, self.shape.dtype, self.device)
        self.eager = Running(EAGER, self.arithmetic.matmul, cos, sin)
        self.running = replace(self.eager, operators=compiled()) if self.arithmetic.compiled else self.eager
        if draw:
            initialise(self, self.shape, spec.seed)
        self.refresh()

    def refresh(self) -> None:
        """Weights have changed: so do the copies that are multiplied, where they are of another type."""
        for module in self.modules():
            if isinstance(module, Multiplied):
                module.refresh(self.arithmetic.matmul)

    @property
    def basis(self) -> Basis | None:
        return self.form.basis

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, tokens_BT: Tensor, received: Tensor | None, run: Running) -> Tensor:
        """The message for the next stage; on the last stage, the stream x before the head."""
        anchor = self.t_fixed.rows(tokens_BT, run.dtype, run.operators) if self.t_fixed else None
        if self.slice.is_first:
            state = self.form.start(self.embed(tokens_BT), anchor)
        else:
            assert received is not None
            state = self.form.decode(received, anchor)
        for i in self.slice.layers:
            if i == self.release_layer:
                state = self._release(state, anchor)
            state = self._through(self.layers[str(i)], state, anchor, run)
        if not self.slice.is_last:
            return self.form.encode(state, anchor)
        return self._release(state, anchor) if self.release_layer == self.shape.layers else state

    def _through(self, block: nn.Module, state: Tensor, anchor: Tensor | None, run: Running) -> Tensor:
        if self.recompute != "block" or not torch.is_grad_enabled():
            return block(state, anchor, run)
        return checkpoint(
            block, state, anchor, run, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )

    def _release(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        x = self.form.read(state, anchor).to(self.shape.dtype)
        if self.on_release is not None and x.requires_grad:
            x.register_hook(self.on_release)
        return x

    # One microbatch: what a worker does, and the reference with it.

    def run_forward(self, tokens_BT: Tensor, received: Tensor | None) -> InFlight:
        if received is not None:
            received = received.detach().requires_grad_()
        output = self(tokens_BT, received, self.running)
        if self.recompute == "stage" and not self.slice.is_last:
            output = output.detach()  # and nothing is kept of how it came about
        return InFlight(tokens_BT, received, output)

    def run_backward(self, flight: InFlight, gradient: Tensor) -> Tensor | None:
        """Adds to the parameters' gradients; returns the message for the previous stage, if there is one."""
        output = flight.output
        if not output.requires_grad:
            output = self(flight.tokens, flight.received, self.running)
        output.backward(gradient)
        return None if flight.received is None else flight.received.grad

    def run_loss(self, flight: InFlight, targets_BT: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Last stage: the microbatch's summed loss, and its backward with gradients of scale × that."""
        loss, gradient = loss_and_gradient(self.head, self.running, flight.output, targets_BT, self.loss_chunk, scale)
        return loss, self.run_backward(flight, gradient)

    def warm_up(self, rows: int, columns: int) -> str | None:
        """One microbatch of zeros there and back, and forgotten: first calls are slow, and a step should not be.

        Returns why operators could not be compiled, if so: the stage then goes on with them as they are."""
        problem = None
        try:
            self._run_zeros(rows, columns)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if self.running is self.eager:
                raise
            self.running, problem = self.eager, first_line(error)
            self._run_zeros(rows, columns)
        self.zero_grad(set_to_none=True)
        return problem

    def _run_zeros(self, rows: int, columns: int) -> None:
        tokens = torch.zeros((rows, columns), dtype=torch.int64, device=self.device)
        message = torch.zeros((rows, columns, self._message_width), dtype=self.shape.dtype, device=self.device)
        flight = self.run_forward(tokens, None if self.slice.is_first else message)
        if self.slice.is_last:
            self.run_loss(flight, tokens, 1.0)
        else:
            self.run_backward(flight, message)

    @torch.no_grad()
    def evaluate(self, tokens_BT: Tensor, received: Tensor | None) -> Tensor:
        return self(tokens_BT, received, self.eager)

    def evaluate_loss(self, x: Tensor, targets_BT: Tensor) -> Tensor:
        return loss_sum(self.logits, x, targets_BT, self.loss_chunk)

    def logits(self, x: Tensor) -> Tensor:
        """Last stage: the head's answer to the stream, in the weights' own type."""
        return self.head(x, self.eager)

    def sync(self) -> Sync | None:
        """Hashes of the bytes in use now (recomputed, so that a flipped bit shows)."""
        if self.basis is None or self.t_fixed is None:
            return None
        return Sync(self.basis.version, hash_of(self.basis.u), VERSION, self.t_fixed.sha256())
