"""A limit for the power that a peer's cards draw (`join --power 200`), by nvidia-smi, while the peer takes part.

Without the tool, a card or the right to do that, the peer goes on without a limit and says why. It must not know the
run.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protomodels_cli.worker import notices
from protomodels_cli.worker.figures import Figures

TOOL = "nvidia-smi"
SECONDS = 10.0  # for one call of it
LOOK_EVERY = 30.0  # seconds between two looks at temperature and power: each is a process


class NotSet(Exception):
    """Why, in one line."""


@dataclass(frozen=True)
class Limits:
    """Of one card, in watts."""

    now: float
    least: float
    most: float


def _ask(*arguments: str) -> list[str]:
    """Fields of the tool's answer. Blocks. Raises NotSet."""
    if (tool := shutil.which(TOOL)) is None:
        raise NotSet(f"there is no {TOOL} here")
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NotSet(f"{TOOL} did not answer within {SECONDS:g} s") from None
    except OSError as e:
        raise NotSet(f"{TOOL}: {e.strerror or e}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise NotSet(f"{TOOL}: {said[0][:200] if said else f'exit code {done.returncode}'}")
    return [field.strip() for field in done.stdout.strip().split(",")]


def _numbers(card: str, *fields: str) -> list[float]:
    answer = _ask("-i", card, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        found = [float(field) for field in answer]
    except ValueError:
        raise NotSet(f"the card does not say its {fields[0]}") from None
    if len(found) != len(fields):
        raise NotSet(f"the card does not say its {fields[0]}")
    return found


def _set(card: str, watts: float) -> None:
    _ask("-i", card, "-pl", f"{watts:g}")


@contextlib.contextmanager
def limited(cards: Sequence[str], watts: float | None, tell: Callable[[notices.AboutPower], None]) -> Iterator[None]:
    """While the block lasts. `cards`: UUIDs; none: the peer computes on something else. Blocks at both ends."""
    before: dict[str, float] = {}
    if watts is not None:
        try:
            if not cards:
                raise NotSet("this peer computes on no NVIDIA card")
            for card in cards:
                limits = Limits(*_numbers(card, "power.limit", "power.min_limit", "power.max_limit"))
                if not limits.least <= watts <= limits.most:
                    raise NotSet(f"the card takes {limits.least:g} to {limits.most:g} W")
                _set(card, watts)
                before[card] = limits.now
            tell(notices.PowerLimited(watts))
        except NotSet as e:
            tell(notices.PowerNotLimited(watts, str(e)))
    try:
        yield
    finally:
        for card, limit in before.items():
            try:
                _set(card, limit)
            except NotSet as e:
                tell(notices.PowerNotRestored(limit, str(e)))


def warmth(card: str) -> tuple[float, float] | None:
    """Degrees Celsius and watts; None: not known. Blocks."""
    try:
        degrees, watts = _numbers(card, "temperature.gpu", "power.draw")
    except NotSet:
        return None
    return degrees, watts


@contextlib.contextmanager
def watched(card: str, figures: Figures) -> Iterator[None]:
    """Its temperature and power are put down now and then, from a thread of its own."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            figures.warmth = warmth(card)
            over.wait(LOOK_EVERY)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join(SECONDS)
