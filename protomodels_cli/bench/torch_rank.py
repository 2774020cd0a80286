"""One rank of what people would otherwise run: the same dense model under torch.distributed.pipelining.

    python -m protomodels_cli.bench.torch_rank --spec SPEC.yaml --rank 0 --master 10.0.0.1:29500 --interface eth0 \\
        --wire bf16 --steps 10 --json OUT.json

Our layers, initial weights, batches and loss; torch's 1F1B schedules, Gloo over TCP, AdamW and gradient clipping. It
uses none of our transport and none of our optimizer: where they gain something, it must show against this.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from protomodels_cli.data.batches import Batches
from protomodels_cli.data.prepare import prepare
from protomodels_cli.errors import UserError
from protomodels_cli.forms import Role
from protomodels_cli.model.shape import slices
from protomodels_cli.model.stage import Stage
from protomodels_cli.protocol.steps import learning_rate
from protomodels_cli.spec.groups import Settings, settings
from protomodels_cli.spec.load import load_spec
from protomodels_cli.spec.schema import RunSpec

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PATIENCE = timedelta(minutes=10)  # for one message; a neighbour that dies is noticed at once
# The schedules and what overlaps in them. Gloo moves no byte of a message before its receive is posted. `interleaved`,
# with one stage a rank, is a 1F1B that posts receives early and keeps up to twice as many microbatches in flight.
OVERLAP = {
    "1f1b": "Sends overlap compute only while the pipeline fills and drains; in between, a rank waits for both before "
    "it computes.",
    "interleaved": "Sends and receives overlap compute throughout; a rank waits for its receive only when it needs it.",
}


class Boundary(nn.Module):
    """A stage as torch's pipeline wants it: one tensor in, one tensor out, in the wire's type between stages."""

    def __init__(self, stage: Stage, wire: torch.dtype):
        super().__init__()
        self.stage, self.wire = stage, wire

    def forward(self, arrived: Tensor) -> Tensor:
        if self.stage.slice.is_first:
            x = self.stage(arrived, None, self.stage.running)
        else:
            only_their_shape = torch.empty(arrived.shape[:2], dtype=torch.int64, device="meta")
            x = self.stage(
                only_their_shape, arrived.to(self.stage.shape.dtype), self.stage.running
            )  # … and so is its gradient
        return self.stage.logits(x) if self.stage.slice.is_last else x.to(self.wire)


class Rank:
    """One process of the pipeline."""

    def __init__(self, spec: RunSpec, rank: int, wire: torch.dtype, schedule: str):
        self.spec, self.wire = spec, wire
        self.batches = Batches(prepare(spec).train, spec)
        part = slices(spec)[rank]
        self.boundary = Boundary(Stage(spec, part, None, "cpu"), wire)
        self.parameters = list(self.boundary.parameters())
        o = spec.optimizer
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)
        self.tokens_per_step = spec.batch.size * spec.model.context
        self.stage = self._pipeline_stage(rank, dist.get_world_size())
        # The loss is divided by all tokens of the step, so the gradients need no scaling afterwards.
        common: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if schedule == "1f1b":
            self.schedule = Schedule1F1B(self.stage, spec.batch.microbatches, **common)
        else:
            self.schedule = ScheduleInterleaved1F1B([self.stage], spec.batch.microbatches, **common)

    def _pipeline_stage(self, index: int, stages: int) -> PipelineStage:
        """A pipeline stage with all shapes given: otherwise torch finds them by an extra forward and backward."""
        rows, columns = self.spec.batch.size // self.spec.batch.microbatches, self.spec.model.context
        tokens = torch.empty(rows, columns, dtype=torch.int64, device="meta")
        message = torch.empty(rows, columns, self.spec.model.width, dtype=self.wire, device="meta", requires_grad=True)
        logits = torch.empty(rows, columns, self.spec.vocab_size, device="meta", requires_grad=True)
        entry, result = tokens if index == 0 else message, logits if index == stages - 1 else message
        return PipelineStage(self.boundary, index, stages, torch.device("cpu"), input_args=entry, output_args=result)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return total / self.tokens_per_step

    def run_step(self, step: int) -> float | None:
        """One optimizer step; its mean loss on the last rank."""
        losses: list[Tensor] = []
        if self.stage.is_first:
            self.schedule.step(self._windows(step)[:, :-1])
        elif self.stage.is_last:
            self.schedule.step(target=self._windows(step)[:, 1:], losses=losses, return_outputs=False)
        else:
            self.schedule.step()
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.spec.optimizer, step, self.spec.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in losses) if losses else None

    def _windows(self, step: int) -> Tensor:
        microbatches = [self.batches.microbatch(step, m) for m in range(self.spec.batch.microbatches)]
        return torch.cat([torch.from_numpy(tokens) for tokens in microbatches])

    def _clip(self) -> None:
        """Clip by the norm of the whole model's gradient: one number is summed over the ranks."""
        if self.spec.optimizer.clip == 0:
            return
        squared = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(self.parameters, self.spec.optimizer.clip, squared.sqrt())

    def received_types(self) -> list[str]:
        """Types of the buffers in which activations and gradients arrived: what was on the wire."""
        infos = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        return sorted({str(info.buffer.dtype) for group in infos for info in group if info.buffer is not None})


def check(spec: RunSpec) -> None:
    """Raise unless torch's pipeline can run this spec and the numbers mean the same in both."""
    stages = len(slices(spec))
    if spec.form.init_problem() is not None:  # no ordinary transformer
        raise UserError(
            f"subspace.form is {spec.subspace.form}, and torch has no subspace",
            "set subspace.form to dense",
            "torch_cannot",
        )
    if spec.subspace.anchor != "fixed":
        raise UserError(
            f"subspace.anchor is {spec.subspace.anchor}, and torch's side has no anchors",
            "set subspace.anchor to fixed",
            "torch_cannot",
        )
    o = spec.optimizer
    for role in get_args(Role):
        same = Settings(1.0, 0.0 if role in ("gain", "anchor") else o.weight_decay, o.beta1, o.beta2, o.eps, o.momentum)
        if settings(spec, role) != same:
            what = "groups sets rates, betas or decays, and torch's side takes those of optimizer for all"
            raise UserError(what, "remove them from groups", "torch_cannot")
    if spec.optimizer.name != "adamw":
        what = f"optimizer.name is {spec.optimizer.name}, and both sides must use the same optimizer"
        raise UserError(what, "set optimizer.name to adamw", "torch_cannot")
    if spec.compute.dtype not in ("auto", "float32"):
        raise UserError(
            f"compute.dtype is {spec.compute.dtype}, and torch's side uses float32",
            "set compute.dtype to float32",
            "torch_cannot",
        )
    if not 2 <= stages <= spec.batch.microbatches:
        what = (
            f"{stages} stages and {spec.batch.microbatches} microbatches: 1F1B needs at least 2 stages and "
            "no fewer microbatches"
        )
        raise UserError(what, "raise stages or batch.microbatches", "torch_cannot")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank of the dense model under torch.distributed.pipelining.")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--master", required=True, help="rank 0's ADDRESS:PORT")
    parser.add_argument("--interface", required=True, help="the network interface that Gloo uses")
    parser.add_argument("--wire", choices=sorted(WIRES), required=True)
    parser.add_argument("--schedule", choices=sorted(OVERLAP), default="1f1b")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        result = run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    options.json.write_text(json.dumps(result))


def run(options: argparse.Namespace) -> dict[str, Any]:
    spec = load_spec(options.spec)
    check(spec)
    torch.set_num_threads(spec.compute.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    stages, where = len(slices(spec)), f"tcp://{options.master}"
    dist.init_process_group("gloo", init_method=where, rank=options.rank, world_size=stages, timeout=PATIENCE)
    rank = Rank(spec, options.rank, WIRES[options.wire], options.schedule)
    seconds, losses, cpu = [], [], time.process_time()
    for step in range(1, options.steps + 1):
        started = time.perf_counter()
        loss = rank.run_step(step)
        seconds.append(time.perf_counter() - started)
        losses += [] if loss is None else [loss]
    cpu = time.process_time() - cpu
    dist.barrier()  # no rank may close its connections while a neighbour still reads from them
    dist.destroy_process_group()
    return {
        "rank": options.rank,
        "step_seconds": seconds,
        "losses": losses,
        "cpu_seconds": cpu,
        "tokens_per_step": rank.tokens_per_step,
        "received_types": rank.received_types(),
        "overlap": OVERLAP[options.schedule],
    }


if __name__ == "__main__":
    main()
