"""A run that nobody leads: what the parts of a coordinator do to it is handed to a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.state import State


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _raise(error: BaseException) -> None:
    raise error


class Led:
    """See protomodels_cli/coordinator/run.py."""

    def __init__(
        self,
        state: Callable[[], State] | None = None,
        history: Callable[[], History] | None = None,
        submit: Callable[..., None] = _nothing,
        send: Callable[..., None] = _nothing,
        tell: Callable[..., None] = _nothing,
        spawn: Callable[..., None] = _nothing,
        fail: Callable[..., None] = _raise,
    ):
        self._state, self._history = state, history
        self.hear = self.submit = submit
        self.send, self.tell, self.spawn, self.fail = send, tell, spawn, fail

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state()

    @property
    def history(self) -> History:
        return self.state.history if self._history is None else self._history()
