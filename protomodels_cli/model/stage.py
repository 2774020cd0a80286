"""A stage: a contiguous slice of the layers, and the work it does on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from protomodels_cli.cost.activations import Recompute
from protomodels_cli.errors import first_line
from protomodels_cli.forms import Form
from protomodels_cli.model.anchor import Anchor
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.basis import Basis, hash_of
from protomodels_cli.model.init import initialise
from protomodels_cli.model.llama import Head, Multiplied, Running, Section, StageModules, rotary
from protomodels_cli.model.loss import loss_and_gradient, loss_sum
from protomodels_cli.model.operators import EAGER, compiled
from protomodels_cli.model.precise import home_of_float64
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


Layout = Sequence[tuple[torch.device, range]]  # of a stage's layers over devices, in order


@dataclass(frozen=True)
class Placed(Section):
    """A section with what its layers read there beside their weights."""

    t_fixed: TFixed | None
    cos: Tensor
    sin: Tensor

    def anchor(self, tokens: Tensor, change: Tensor | None, run: Running) -> Tensor | None:
        """T_fixed's rows are made anew on each device: a token's id is less to move than its row."""
        if self.t_fixed is None:
            return change if change is None else moved(change, self.device).to(run.dtype)
        dtype = run.dtype if change is None else change.dtype
        fixed = self.t_fixed.rows(moved(tokens, self.device), dtype, run.operators)
        return fixed if change is None else (fixed + moved(change, self.device)).to(run.dtype)

    def sync(self) -> Sync | None:
        if self.t_fixed is None:
            return None
        basis = self.form.basis
        return Sync(basis.version, hash_of(basis.u), VERSION, self.t_fixed.sha256())


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Without waiting, except to the CPU: it would not know when the numbers are there."""
    return x.to(device, non_blocking=device.type == "cuda")


class Stage(StageModules):
    """Layers `slice.layers` of the model, with the embedding on the first stage and the head on the last.

    Over several devices it is one stage still: messages come and go on the first of them."""

    def __init__(
        self,
        spec: RunSpec,
        slice_: Slice,
        basis: Basis | None,
        device: torch.device | str | Layout = "cpu",
        recompute: Recompute = "none",
        draw: bool = True,
    ):
        """`draw`: weights from the seed; otherwise they are to be loaded."""
        shape = Shape.of(spec)
        layout = [(device, slice_.layers)] if isinstance(device, torch.device | str) else device
        sections = [_placed(spec, shape, torch.device(one), layers, basis) for one, layers in layout]
        super().__init__(shape, slice_, *sections)
        self.sections = sections
        self.loss_chunk, self._message_width = spec.compute.loss_chunk, spec.boundary_width
        self.loss_scale = 1.0 / (spec.batch.size * spec.model.context)  # of a token's loss in that of a step
        self.early_weight = spec.early_loss  # of segments' own losses in this step's
        self.on_release: Callable[[Tensor], None] | None = None  # is given ∂loss/∂x there, per microbatch
        self.recompute = recompute
        self.arithmetic = choose(spec.compute, *self.devices)
        self.arithmetic.prepare(*self.devices)
        first = self.sections[0]
        self.eager = Running(EAGER, self.arithmetic.matmul, first.cos, first.sin)
        self.running = replace(self.eager, operators=compiled()) if self.arithmetic.compiled else self.eager
        if draw:
            initialise(self, spec)
        self.refresh()

    def refresh(self) -> None:
        """Weights have changed: so do the copies that are multiplied, where they are of another type."""
        for module in self.modules():
            if isinstance(module, Multiplied):
                module.refresh(self.arithmetic.matmul)

    # Of the first section, which is the only one on most peers.

    @property
    def form(self) -> Form:
        return self.sections[0].form

    @property
    def basis(self) -> Basis | None:
        return self.form.basis

    @property
    def t_fixed(self) -> TFixed | None:
        return self.sections[0].t_fixed

    @property
    def device(self) -> torch.device:
        return self.sections[0].device

    @property
    def devices(self) -> list[torch.device]:
        """Each once."""
        return list(dict.fromkeys(section.device for section in self.sections))

    @property
    def release_device(self) -> torch.device:
        """Where the stream leaves S, on the last stage."""
        return next((s.device for s in self.sections if self.release_layer in s.layers), self.sections[-1].device)

    def forward(self, tokens_BT: Tensor, received: Tensor | None, run: Running) -> Tensor:
        """The message for the next stage; on the last stage, the stream x before the head, where that lies."""
        state = self.embed(tokens_BT) if self.slice.is_first else received
        assert state is not None
        anchor: Tensor | None = None
        for section in self.sections:
            here, form = replace(run, cos=section.cos, sin=section.sin), section.form
            state = moved(state, section.device)
            if section is not self.sections[0] and anchor is not None:
                # A trained one is one tensor for all sections: so its gradient is summed in one order.
                trained = self.shape.trains_anchors
                anchor = moved(anchor, section.device) if trained else section.anchor(tokens_BT, None, here)
            for i in section.layers:
                block: Any = self.layers[str(i)]
                if i == self.slice.first_layer or i in self.shape.segment_starts:
                    if i > self.slice.first_layer:  # what crosses a boundary here, where there is none
                        state = self._learnt_early(i - 1, form.encode(state, anchor), tokens_BT, here)
                    if self.shape.trains_anchors:
                        change = block.anchor(moved(tokens_BT, section.device))
                        anchor = block.anchor.mixed(section.anchor(tokens_BT, change, here))
                    else:
                        anchor = section.anchor(tokens_BT, None, here)
                    state = form.start(state, anchor) if i == 0 else form.decode(state, anchor)
                if i == self.release_layer:
                    state, anchor = self._release(form, state, anchor), None
                state = self._through_block(block, state, anchor, here)
        if not self.slice.is_last:
            message = self._learnt_early(self.slice.end_layer - 1, form.encode(state, anchor), tokens_BT, here)
            return moved(message, self.device)
        return self._release(form, state, anchor) if self.release_layer == self.shape.layers else state

    def _learnt_early(self, layer: int, message: Tensor, tokens_BT: Tensor, run: Running) -> Tensor:
        """What a segment sends, which its own head learns from when gradients come back."""
        if layer not in self.shape.heading_layers or not message.requires_grad:
            return message
        block: Any = self.layers[str(layer)]
        return EarlyLoss.apply(message, tokens_BT, block.early, run, self)

    def _through_block(self, block: nn.Module, state: Tensor, anchor: Tensor | None, run: Running) -> Tensor:
        if self.recompute != "block" or not torch.is_grad_enabled():
            return block(state, anchor, run)
        return checkpoint(
            block, state, anchor, run, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )

    def _release(self, form: Form, state: Tensor, anchor: Tensor | None) -> Tensor:
        x = form.read(state, anchor).to(self.shape.dtype)
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
        x, targets_BT = flight.output, moved(targets_BT, flight.output.device)
        loss, gradient = loss_and_gradient(self.head, self.running, x, targets_BT, self.loss_chunk, scale)
        return self._home(loss), self.run_backward(flight, gradient)

    def _home(self, loss: Tensor) -> Tensor:
        return moved(loss, home_of_float64(self.device))

    def warm_up(self, rows: int, columns: int) -> str | None:
        """Microbatches of zeros there and back, and forgotten: first calls are slow, and a step should not be.

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
        self.forget_gradients()
        return problem

    def forget_gradients(self) -> None:
        self.zero_grad(set_to_none=True)
        for module in self.modules():
            if isinstance(module, Anchor):
                module.take()

    def _run_zeros(self, rows: int, columns: int) -> None:
        tokens = torch.zeros((rows, columns), dtype=torch.int64, device=self.device)
        message = torch.zeros((rows, columns, self._message_width), dtype=self.shape.dtype, device=self.device)
        for _ in range(2):  # the second adds to the first one's gradients
            flight = self.run_forward(tokens, None if self.slice.is_first else message)
            if self.slice.is_last:
                self.run_loss(flight, tokens, self.loss_scale)
            else:
                self.run_backward(flight, message)

    @torch.no_grad()
    def evaluate(self, tokens_BT: Tensor, received: Tensor | None) -> Tensor:
        return self(tokens_BT, received, self.eager)

    def evaluate_loss(self, x: Tensor, targets_BT: Tensor) -> Tensor:
        return self._home(loss_sum(self.logits, x, moved(targets_BT, x.device), self.loss_chunk))

    def logits(self, x: Tensor) -> Tensor:
        """Last stage: the head's answer to the stream, in the weights' own type."""
        return self.head(x, self.eager)

    def sync(self) -> Sync | None:
        """Hashes of the bytes in use now (recomputed, so that a flipped bit shows); of a section that differs, if one
        does."""
        first, *others = (section.sync() for section in self.sections)
        return next((other for other in others if other != first), first)


class EarlyLoss(torch.autograd.Function):
    """Nothing on the way there. On the way back the gradient of a segment's own loss joins what comes from the next:
    what follows a token is there as the token behind it, but for the last."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, tokens_BT: Tensor, head: Head, run: Running, stage: Stage) -> Tensor:
        ctx.save_for_backward(message, tokens_BT)
        ctx.head, ctx.run, ctx.stage = head, run, stage
        return message.view_as(message)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        stage, (message, tokens_BT) = ctx.stage, ctx.saved_tensors
        if stage.early_weight:
            home, scale = ctx.head.out.weight.device, stage.loss_scale * stage.early_weight
            x, targets = moved(message[:, :-1].contiguous(), home), moved(tokens_BT[:, 1:], home)
            with torch.enable_grad():
                _, own = loss_and_gradient(ctx.head, ctx.run, x, targets, stage.loss_chunk, scale)
            gradient = gradient + F.pad(moved(own, gradient.device), (0, 0, 0, 1))
        return gradient, None, None, None, None


def _placed(spec: RunSpec, shape: Shape, device: torch.device, layers: range, basis: Basis | None) -> Placed:
    cos, sin = rotary(spec.model.context, shape.head_dim, shape.rope_theta, shape.dtype, device)
    form = spec.form(None if basis is None else basis.copy_to(device))
    t_fixed = t_fixed_of(spec, device) if spec.form.has_basis else None
    return Placed(cos.device, layers, form, t_fixed, cos, sin)  # that device by its number
