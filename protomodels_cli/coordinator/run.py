"""The interface of the coordinator to its services: the run's state, and what a service may do to the run."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.state import State


class Run(Protocol):
    @property
    def state(self) -> State:
        """All that led to it is on disk."""

    @property
    def history(self) -> History:
        """As it is in the journal."""

    def hear(self, said: events.Event | events.Aside, /) -> None:
        """Of a peer or the owner: what it says of parts or of an audit is looked into first."""

    def submit(self, event: events.Event, /) -> None:
        """To the machine."""

    def send(self, peer: str, **body: Any) -> None:
        """To a peer, if it has a session."""

    def tell(self, notice: Notice, /) -> None:
        """To the owner."""

    def spawn(self, work: Coroutine[Any, Any, None], /) -> None:
        """Run this as a task of its own. An exception in it ends the coordinator."""

    def fail(self, error: BaseException, /) -> None:
        """End the coordinator with this: nothing can be decided any more."""
