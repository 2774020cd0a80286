"""What the owner is told of elsewhere (`--notify`): that the run has ended, stands still, or is about to. Pure."""

from __future__ import annotations

from protomodels_cli import timeouts
from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.next_task import waiting_for
from protomodels_cli.coordinator.sentences import sentence, waiting
from protomodels_cli.coordinator.state import State
from protomodels_cli.quantities import duration


def alarm_of(notice: n.Notice) -> str | None:
    """None: that can wait until the owner looks."""
    match notice:
        case n.NoSpareLeft() | n.RunDone() | n.RunStopped() | n.Interrupted() | n.Ended():
            return sentence(notice)
        case n.Paused(why) if not isinstance(why, reasons.ByOwner):
            return sentence(notice)
        case _:
            return None


class LongWait:
    """Notices that a run has waited for peers for long: once for each wait."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def look(self, state: State, now: float) -> str | None:
        """Called now and then; what the owner is to hear, if anything."""
        if not state.stands_still or state.history.over or state.stopped:
            after, self._since = self._since, None
            told, self._told = self._told, False
            return None if after is None or not told else f"goes on after a wait of {duration(now - after)}"
        self._since = now if self._since is None else self._since
        if self._told or now - self._since < timeouts.NOTIFY_WAIT:
            return None
        self._told = True
        what = waiting_for(state, now)
        return f"has stood still for {duration(now - self._since)}" + (f": waiting for {waiting(what)}" if what else "")
