"""The reference: the whole model trained in one process, with exactly the operations a pipeline does.

Microbatch by microbatch and stage by stage, every boundary crossed through the wire's codec, gradients
accumulated in microbatch order. What it computes is the definition of right for everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protomodels_cli.cost.activations import Recompute
from protomodels_cli.data.batches import Batches, held_out_windows
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.data.shards import TokenStream
from protomodels_cli.errors import RunStopped
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.model.basis import Basis, initial_basis
from protomodels_cli.model.init import load_checkpoint
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.shape import Shape, slices
from protomodels_cli.model.stage import Carry, InFlight, Sync, t_fixed_of
from protomodels_cli.model.state import parameter_hashes
from protomodels_cli.model.trainer import StageTrainer
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.hashes import weights_sha256
from protomodels_cli.protocol.messages import MessageKey
from protomodels_cli.protocol.t_fixed import VERSION as T_FIXED_VERSION
from protomodels_cli.spec.schema import RunSpec

Row = dict[str, Any]


@dataclass(frozen=True)
class NextBasis:
    """A computed basis that waits for its step."""

    basis: Basis
    first_step: int


class Reference:
    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        carry: Carry,
        device: torch.device | str = "cpu",
        base: Path = Path(),
    ):
        """`base`: what the spec's paths are relative to."""
        torch.set_num_threads(spec.compute.threads)
        self.spec, self.corpus, self.carry, self.device = spec, corpus, carry, torch.device(device)
        shape = Shape.of(spec)
        self.basis: Basis | None = None
        if spec.form.has_basis:
            self.basis = initial_basis(shape.width, spec.subspace.k, spec.seed, shape.dtype)
        recompute: Recompute = "none" if spec.compute.recompute == "auto" else spec.compute.recompute
        self.trainers = [StageTrainer(spec, slice_, self.basis, device, recompute) for slice_ in slices(spec)]
        self.stages = [trainer.stage for trainer in self.trainers]
        self.head_was_tied = False
        if spec.model.init is not None:
            with Checkpoint(base / spec.model.init, spec) as checkpoint:
                load_checkpoint(self.stages, checkpoint)
                for stage in self.stages:
                    stage.refresh()
                self.head_was_tied = checkpoint.tied
        for stage in self.stages:
            if stage.running.is_compiled:  # or goes on without, where that fails
                stage.warm_up(spec.batch.size // spec.batch.microbatches, spec.model.context)
        self.batches = Batches(corpus.train, spec)
        self.next_basis: NextBasis | None = None
        self.step = 0
        self._skipped_in_a_row = 0
        self._t_fixed = t_fixed_of(spec).sha256() if self.basis is not None else ""
        self.check_sync()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for stage in self.stages for p in stage.parameters())

    def train(self, until: int | None = None) -> Iterator[Row]:
        """Take the steps up to `until` (default: all), yielding a metrics row for everything that happens."""
        last = self.spec.steps if until is None else until
        if self.step == 0 and self.spec.model.init is not None:
            yield {"event": "eval", "step": 0, "loss": self.evaluate()}  # what the checkpoint was worth
        while self.step < last:
            yield from self.run_step()
            self._stop_if_broken()
            if self.step == last or steps.is_due(self.step, self.spec.eval.interval):
                yield {"event": "eval", "step": self.step, "loss": self.evaluate()}

    def run_step(self) -> list[Row]:
        """Take one step: a row for it, and one for each thing that happened beside it."""
        started = time.perf_counter()
        rows: list[Row] = []
        step = self.step + 1
        if self.next_basis is not None and self.next_basis.first_step == step:
            rows.append(self._switch_basis(self.next_basis))
        loss_sum = self.accumulate(step)
        outcome = steps.decide(self.spec, step, loss_sum, list(self.prepare().values()))
        self._decide(step, outcome)
        self.step = step
        seconds = time.perf_counter() - started
        rows.append(
            {
                "event": "step",
                "step": step,
                "loss": outcome.loss,
                "lr": outcome.lr,
                "grad_norm": outcome.norm,
                "applied": outcome.apply,
                "tokens": outcome.tokens,
                "seconds": seconds,
                "basis_version": None if self.basis is None else self.basis.version,
            }
        )
        if steps.reports(self.spec.subspace, step):
            rows += self._report_subspace(step)
        return rows

    def accumulate(self, step: int) -> float:
        """Forward and backward of all microbatches. Leaves gradients on the parameters; returns the summed loss."""
        for trainer in self.trainers:
            trainer.begin(step)
        total = torch.zeros((), dtype=torch.float64, device=home_of_float64(self.device))
        for m in range(self.spec.batch.microbatches):
            total += self.run_microbatch(step, m)
        return float(total)

    def run_microbatch(self, step: int, microbatch: int) -> Tensor:
        """Forward and backward through all stages. Adds to the gradients; returns the summed loss."""
        last, windows = self.stages[-1], self.windows(step, microbatch)
        flights = self.forward(windows[:, :-1], step, microbatch, windows)
        loss, gradient = last.run_loss(flights[-1], windows[:, 1:], last.loss_scale)
        for i in reversed(range(len(self.stages) - 1)):
            assert gradient is not None
            arrived = self.carry(gradient, MessageKey(step, microbatch, i, "backward"))
            gradient = self.stages[i].run_backward(flights[i], arrived)
        return loss

    def windows(self, step: int, microbatch: int) -> Tensor:
        """The token ids of a microbatch, (B, T+1)."""
        return torch.from_numpy(self.batches.microbatch(step, microbatch)).to(self.device)

    def forward(self, tokens_BT: Tensor, step: int, microbatch: int, windows: Tensor | None = None) -> list[InFlight]:
        flights = [self.stages[0].run_forward(tokens_BT, None)]
        for i, stage in enumerate(self.stages[1:]):
            arrived = self.carry(flights[-1].output, MessageKey(step, microbatch, i, "forward"), windows)
            flights.append(stage.run_forward(tokens_BT, arrived))
        return flights

    def prepare(self) -> dict[str, float]:
        """Squared norms of all units in layer order, after projection."""
        return {unit: squared for trainer in self.trainers for unit, squared in trainer.prepare().items()}

    def _decide(self, step: int, outcome: steps.Outcome) -> None:
        for trainer in self.trainers:
            trainer.decide(step, outcome.apply, outcome.lr, outcome.clip)
        self.carry.decide(outcome.apply)
        self._skipped_in_a_row = 0 if outcome.apply else self._skipped_in_a_row + 1

    def _report_subspace(self, step: int) -> list[Row]:
        """The subspace's quantities, from the gradients gathered; where U moves, the basis that comes next."""
        reported = self.trainers[-1].report(step)
        if reported is None:
            return []
        row, new = reported
        if new is not None:
            self.next_basis = NextBasis(new, row["first_step"])
        return [{"event": "subspace", "step": step, **row}]

    def _switch_basis(self, new: NextBasis) -> Row:
        for trainer in self.trainers:
            trainer.switch_basis(new.basis)
        self.carry.reset()
        self.basis, self.next_basis = new.basis, None
        return {
            "event": "switch",
            "step": new.first_step,
            "version": self.basis.version,
            "sha256": self.basis.sha256,
        }

    def _stop_if_broken(self) -> None:
        """After a step's rows are out: is there a reason not to go on?"""
        if self._skipped_in_a_row >= self.spec.limits.nonfinite_steps:
            raise RunStopped(
                f"{self._skipped_in_a_row} steps in a row, up to step {self.step}, had a non-finite loss or gradient",
                f"lower optimizer.lr ({self.spec.optimizer.lr:g}), or raise optimizer.schedule.warmup_steps",
                "nonfinite",
            )
        if self.step % self.spec.subspace.sync_interval == 0:
            self.check_sync()

    def check_sync(self) -> None:
        """Every stage must use the same bytes of U and T_fixed: with different ones the stream is garbage."""
        if self.basis is None:
            return
        right = Sync(self.basis.version, self.basis.sha256, T_FIXED_VERSION, self._t_fixed)
        for stage in self.stages:
            if stage.sync() != right:
                raise RunStopped(
                    f"stage {stage.slice.index} uses a different U or T_fixed (hash mismatch at step {self.step})",
                    "start again; if the mismatch comes back, test this machine's memory",
                    "hash_mismatch",
                )

    def evaluate(self, codecs: bool = True, held_out: TokenStream | None = None) -> float:
        """Mean loss on the held-out windows, with the wire's codecs or without. Changes nothing."""
        total, tokens = 0.0, 0
        stream = self.corpus.held_out if held_out is None else held_out
        for m, windows in enumerate(held_out_windows(stream, self.spec)):
            batch = torch.from_numpy(windows).to(self.device)
            x = self.stages[0].evaluate(batch[:, :-1], None)
            for i, stage in enumerate(self.stages[1:]):
                if codecs:
                    x = self.carry(x, MessageKey(self.step, m, i, "evaluation"))
                x = stage.evaluate(batch[:, :-1], x)
            total += float(self.stages[-1].evaluate_loss(x, batch[:, 1:]))
            tokens += batch[:, 1:].numel()
        return total / tokens

    def weights_sha256(self) -> str:
        return weights_sha256(h for stage in self.stages for h in parameter_hashes(stage))
