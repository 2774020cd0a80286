"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from protomodels_cli.errors import UserError
from protomodels_cli.inference.load import Loaded
from protomodels_cli.inference.model import Cache, Decoder
from protomodels_cli.inference.sampling import next_token

WEIGHTS_PER_THREAD = 16_000_000


@dataclass(frozen=True)
class Sampling:
    tokens: int
    temperature: float
    top_p: float
    seed: int


def generate(loaded: Loaded, prompt: list[int], sampling: Sampling) -> Iterator[int]:
    """The ids that follow the prompt: as many as asked for, up to the end of a text or of the model's context."""
    model = loaded.decoder
    capacity = min(loaded.context, len(prompt) + sampling.tokens)
    known = model.architecture.vocab_size if loaded.tokenizer is None else loaded.tokenizer.vocab_size
    cache = Cache(model, 1, capacity)
    generator = torch.Generator().manual_seed(sampling.seed)
    fresh = prompt
    for _ in range(capacity - len(prompt)):
        x = model.stream(torch.tensor([fresh], device=model.device), cache)
        logits = model.head(x[0, -1])[:known]  # a vocabulary may be padded with ids that mean nothing
        if not bool(logits.isfinite().all()):
            raise UserError("the model's logits are not finite", "use an earlier snapshot, or float32", "nonfinite")
        token = next_token(logits, sampling.temperature, sampling.top_p, generator)
        if token in loaded.ends:
            return
        yield token
        fresh = [token]


def limit_threads(model: Decoder) -> None:
    """Of the whole process, which then writes and does nothing else. The threads of a small model wait for each other
    most of the time: on a busy machine two of them wrote the demo's text at 6 tokens a second, and one at 285."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), model.parameters // WEIGHTS_PER_THREAD)))
