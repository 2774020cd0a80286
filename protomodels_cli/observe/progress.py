"""Rows of metrics as lines on a terminal: a coordinator's and the reference's alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from protomodels_cli.protocol.throughput import seconds_left, tokens_per_s, with_step
from protomodels_cli.quantities import duration, rate

EVERY = 2.0  # seconds between two steps that are shown


class Progress:
    """Lines for steps, no more than one every two seconds, and always the first and the last."""

    def __init__(self, steps: int):
        self.steps, self._shown = steps, -1e9
        self._began, self._moments = time.monotonic(), tuple[float, ...]()

    def line(self, row: Mapping[str, Any], speed: float | None = None) -> str | None:
        """What there is to show of this row, if anything. `speed`: tokens a second, where the caller knows them."""
        match row["event"]:
            case "step":
                return self._step(row, speed)
            case "eval":
                return f"eval  at step {row['step']}: held-out loss {row['loss']:.4f}"
            case "subspace" if "first_step" in row:
                return _basis(row)
            case _:
                return None

    def _step(self, row: Mapping[str, Any], speed: float | None) -> str | None:
        """A step that is redone counts again: it took its time again."""
        now, step, applied, tokens = time.monotonic(), row["step"], row["applied"], row["tokens"]
        is_first, self._moments = not self._moments, with_step(self._moments, self._began, now)
        if not is_first and step != self.steps and applied and now - self._shown < EVERY:
            return None
        self._shown = now
        if speed is None:
            speed = tokens_per_s(self._moments, tokens)
        left = seconds_left(self.steps - step, tokens, speed)
        pace = "" if left is None else f" | {rate(speed, 'tok/s')} | eta {duration(left)}"
        width = len(str(self.steps))
        skipped = "" if applied else " | SKIPPED: not finite"
        return (
            f"step {step:{width}d}/{self.steps} ({100 * step / self.steps:5.1f}%) | loss {row['loss']:.4f} | "
            f"lr {row['lr']:.1e} | norm {row['grad_norm']:.2f}{pace}{skipped}"
        )


def _basis(row: Mapping[str, Any]) -> str:
    turns = f"basis {row['version']} from step {row['first_step']}: turns by up to {row.get('angle_max', 0.0):.3f} rad"
    if "captured_before" not in row or "captured_after" not in row:
        return turns
    return f"{turns}, captures {row['captured_before']:.1%} → {row['captured_after']:.1%} of the gradient"
