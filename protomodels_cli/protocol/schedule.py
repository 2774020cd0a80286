"""Which work a stage does next: the worker follows it, and the cost model plays it through. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple


class View(NamedTuple):
    """A stage in the middle of a step. A tuple: a forecast makes hundreds of thousands."""

    gradient: bool  # the next microbatch's backward message is here
    input: bool  # the next one's forward message (on the first stage: its token ids) is here
    in_flight: int  # microbatches between their forward and their backward
    on_the_way: int  # forward messages sent that the next stage has not taken yet
    limit: int  # for either of the last two


def next_work(view: View) -> Literal["backward", "forward"] | None:
    """Backward first: it frees memory here and lets the stages before go on. 1F1B arises by itself."""
    if view.gradient:
        return "backward"
    if view.input and view.in_flight < view.limit and view.on_the_way < view.limit:
        return "forward"
    return None
