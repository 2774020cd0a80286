"""How well a model predicts a text: windows of token ids in, loss and what follows from it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protomodels_cli.data.tokenizers import Tokenizer
from protomodels_cli.inference.model import Decoder
from protomodels_cli.inference.text import bytes_of
from protomodels_cli.model.loss import loss_sum

_LOGITS_AT_ONCE = 1024  # tokens


@dataclass
class Score:
    """Sums over the windows so far."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    windows: int = 0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None where the ids stand for no text that we know."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def windows(
    chunks: Iterable[np.ndarray], context: int, most: int | None = None, tokens_at_once: int = 4096
) -> Iterator[np.ndarray]:
    """A stream of ids as windows of context + 1, stacked, the last one as long as it is.

    As in training, neighbours share one token: every token but the very first is predicted once."""
    at_once = max(1, tokens_at_once // context)
    waiting: list[np.ndarray] = []
    held, left = 0, math.inf if most is None else most

    def cut(ids: np.ndarray, count: int) -> np.ndarray:
        return np.stack([ids[i * context : (i + 1) * context + 1] for i in range(count)])

    for chunk in chunks:
        waiting.append(chunk)
        held += len(chunk)
        while left and held > (count := int(min(at_once, left))) * context:
            ids = np.concatenate(waiting)
            yield cut(ids, count)
            waiting, held, left = [ids[count * context :]], held - count * context, left - count
        if not left:
            return
    ids = np.concatenate(waiting) if waiting else np.empty(0, dtype=np.int64)
    whole = int(min((len(ids) - 1) // context, left)) if len(ids) else 0
    if whole:
        yield cut(ids, whole)
    rest = ids[whole * context :]
    if len(rest) > 1 and whole < left:
        yield rest[None]


def score(
    model: Decoder,
    tokenizer: Tokenizer | None,
    batches: Iterable[np.ndarray],
    show: Callable[[Score], None] = lambda _: None,
) -> Score:
    """Every window's tokens but its first, predicted from those before them in the window."""
    total = Score()
    for batch in batches:
        ids = torch.from_numpy(batch.astype(np.int64)).to(model.device)
        x = model.stream(ids[:, :-1])
        total.nats += float(loss_sum(model.head, x, ids[:, 1:], _LOGITS_AT_ONCE))
        total.tokens += batch[:, 1:].size
        total.bytes += 0 if tokenizer is None else sum(bytes_of(tokenizer, row) for row in batch[:, 1:])
        total.windows += len(batch)
        show(total)
    return total
