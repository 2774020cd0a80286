"""Curves of a run that stay small however long it is: a point is the mean over a stretch of steps, and where there are
too many, stretches become twice as long. What was redone counts as it was the last time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST = 400  # points


class Curve:
    def __init__(self, most: int = MOST):
        self._most, self.width = most, 1
        self._points: dict[int, tuple[float, int]] = {}  # stretch → sum and count, by rising step
        self._last = 0
        self._changed: set[int] = set()
        self._rewritten = False

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        if step <= self._last:  # after a rollback
            first = (step - 1) // self.width
            self._points = {at: point for at, point in self._points.items() if at < first}
            self._rewritten = True
        self._last = step
        at = (step - 1) // self.width
        total, count = self._points.get(at, (0.0, 0))
        self._points[at] = total + value, count + 1
        self._changed.add(at)
        if len(self._points) > self._most:
            self._double()

    def _double(self) -> None:
        points, self._points = self._points, {}
        self.width *= 2
        for at, (total, count) in points.items():
            before = self._points.get(at // 2, (0.0, 0))
            self._points[at // 2] = before[0] + total, before[1] + count
        self._rewritten = True

    def points(self) -> list[list[float]]:
        """Each the last step of its stretch so far, the mean, and of how many values."""
        return [self._point(at) for at in self._points]

    def _point(self, at: int) -> list[float]:
        total, count = self._points[at]
        return [min((at + 1) * self.width, self._last), float(f"{total / count:.5g}"), count]

    def news(self) -> dict[str, Any]:
        """What has changed since the last time: `whole` where earlier points are void."""
        whole, changed = self._rewritten, sorted(self._changed & self._points.keys())
        self._rewritten, self._changed = False, set()
        if whole:
            return {"whole": True, "points": self.points(), "width": self.width}
        return {"points": [self._point(at) for at in changed], "width": self.width}


class Curves:
    """Of the rows of metrics.jsonl."""

    def __init__(self) -> None:
        self.of = {"loss": Curve(), "held_out": Curve(), "tokens_per_s": Curve()}

    def take(self, row: Mapping[str, Any]) -> None:
        step, loss = row.get("step"), row.get("loss")
        if not isinstance(step, int) or not isinstance(loss, float | int):
            return
        match row.get("event"):
            case "step":
                self.of["loss"].add(step, loss)
                tokens, seconds = row.get("tokens"), row.get("seconds")
                if isinstance(tokens, int) and isinstance(seconds, float) and seconds > 0:
                    self.of["tokens_per_s"].add(step, tokens / seconds)
            case "eval":
                self.of["held_out"].add(max(step, 1), loss)

    def whole(self) -> dict[str, Any]:
        return {name: {"whole": True, "points": c.points(), "width": c.width} for name, c in self.of.items()}

    def news(self) -> dict[str, Any]:
        return {name: news for name, curve in self.of.items() if (news := curve.news())["points"]}
