"""A reference for sweeps: the text lies on the device, and nothing waits for the device within a step.

What it computes is what the reference computes: only where a batch's tokens come from, and when one looks, differs.
"""

from __future__ import annotations

import gc
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from protomodels_cli.codecs import Carrier, End
from protomodels_cli.data.batches import Batches
from protomodels_cli.errors import first_line
from protomodels_cli.lab.mapl import Mapl, Projectors
from protomodels_cli.lab.recipes import Recipe
from protomodels_cli.lab.relay import Relay, give_ends
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.scales import Scale, data_key, text_of
from protomodels_cli.lab.shared_anchor import SharedTable
from protomodels_cli.model.arithmetic import choose
from protomodels_cli.model.reference import Reference
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.messages import LEGS, MessageKey
from protomodels_cli.spec.schema import RunSpec

SHAPES = 64  # that a function is compiled for in one process: a sweep has many, and beyond torch's own 8 it would stop


class Trained(Reference):
    def __init__(self, spec: RunSpec, scale: Scale, recipe: Recipe, device: str):
        self.text, self.recipe = text_of(scale), recipe
        self.carrier = Carrier(spec)
        if choose(spec.compute, torch.device(device)).compiled:
            torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
        super().__init__(spec, self.text.corpus, self.carrier, device)
        if spec.form is Relay:
            give_ends(self)
        self.projectors = Projectors(self) if spec.form is Mapl else None
        if all(stage.running.is_compiled for stage in self.stages):
            self.carrier.compiled = self._codecs_compile()
        self.tokens = tokens_on(data_key(scale), device)
        self.order = torch.from_numpy(order_of(self.batches, spec.steps * spec.batch.size)).to(self.device)
        self.shared = None if recipe.sharing is None else SharedTable(self, recipe.sharing)

    def _codecs_compile(self) -> bool:
        """Whether zeros cross a boundary and come back through compiled functions."""
        carrier = Carrier(self.spec)
        carrier.compiled = True
        rows = self.spec.batch.size // self.spec.batch.microbatches
        shape = (rows, self.spec.model.context, self.spec.boundary_width)
        zeros = torch.zeros(shape, dtype=self.stages[0].shape.dtype, device=self.device)
        try:
            for step, leg in product(End(self.spec).first_steps(), LEGS):
                carrier(zeros, MessageKey(step, 0, 0, leg), torch.zeros(shape[:2], dtype=torch.int64))
        except Exception as error:
            say(f"codecs are not compiled: {first_line(error)}")
            return False
        return True

    def windows(self, step: int, microbatch: int) -> Tensor:
        first = (step - 1) * self.batches.batch + microbatch * self.batches.microbatch_size
        starts = self.order[first : first + self.batches.microbatch_size] * self.batches.context
        places = torch.arange(self.batches.context + 1, device=self.device)
        return self.tokens[starts.unsqueeze(1) + places].long()

    def _decide(self, step: int, outcome: steps.Outcome) -> None:
        super()._decide(step, outcome)
        if self.projectors is not None:
            if outcome.apply:
                self.projectors.step(outcome.lr * self.recipe.lr / self.recipe.head_lr)
            self.projectors.forget()
        if self.shared is not None and outcome.apply:
            self.shared.publish()

    @property
    def bytes_of_sums(self) -> float:
        """Bytes a token, over each boundary, that keep a shared anchor in step."""
        tokens = self.step * self.spec.batch.size * self.spec.model.context
        return 0.0 if self.shared is None else self.shared.bytes_per_token(tokens)

    def facts(self) -> Result:
        """What a run of this kind has in its result that others have not."""
        return {}

    def parameter_counts(self) -> dict[str, int]:
        """By what a model is compared by: its blocks' matrices, the tables of tokens, the head, and what is there in
        training alone."""
        found = {"blocks": 0, "tables": 0, "head": 0, "early": 0}
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                parts = {"embed": "tables", ".anchor.": "tables", ".early.": "early", "head.": "head"}
                kind = next((kind for part, kind in parts.items() if part in name), "blocks")
                found[kind] += 0 if id(parameter) in seen else parameter.numel()
                seen.add(id(parameter))
        found["blocks"] += 0 if self.projectors is None else self.projectors.numbers
        return found


def order_of(batches: Batches, samples: int) -> np.ndarray:
    """The windows of all steps, in their order: worked out once for every seed."""
    key = (batches.seed, batches.windows, samples)
    if key not in _orders:
        _orders[key] = np.array([batches.window(i) for i in range(samples)], dtype=np.int64)
    return _orders[key]


_orders: dict[tuple[int, int, int], np.ndarray] = {}


@cache
def tokens_on(text_key: Scale, device: str) -> Tensor:
    stream = text_of(text_key).corpus.train
    return torch.from_numpy(stream.read(0, len(stream)).astype(np.int32)).to(device)


def free() -> None:
    """Give back what the last run of this process had: others share the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
