"""Where a peer's notices and errors go: its terminal, its log, and events.jsonl in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC, UserError
from protomodels_cli.observe import logs
from protomodels_cli.observe.metrics import JsonLines
from protomodels_cli.observe.notices import Teller
from protomodels_cli.wire import troubles
from protomodels_cli.worker import notices as n
from protomodels_cli.worker import problems as p
from protomodels_cli.worker import sentences

Tell = Callable[[n.Notice], None]


class PeerError(UserError):
    """A problem that ends a peer."""

    def __init__(self, problem: p.Problem):
        super().__init__(*sentences.problem(problem), kind=problem.kind)
        self.problem = problem
        match problem:
            case p.Dismissed(exit_code=code):
                self.exit_code = code
            case p.NoSuchDevice():
                self.exit_code = EXIT_SPEC
            case p.OtherPackage() | p.SpecNotUnderstood() | p.SpecReadDifferently() | p.ClockSkew():
                self.exit_code = EXIT_REFUSED
            case _:
                self.exit_code = EXIT_OUTSIDE


def trouble_of(error: Exception) -> troubles.Own:
    """What the coordinator hears of the error that ends this peer."""
    if isinstance(error, PeerError) and isinstance(error.problem, troubles.Own):
        return error.problem
    return troubles.Failed(": ".join([type(error).__name__, *str(error).splitlines()[:1]]))


class PeerTeller(Teller[n.Notice]):
    """A disk that is full or gone is no reason to end a peer: its terminal says the same."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__(sentences.sentence, logs.WORKER, say)

    def record(self, notice: n.Notice) -> None:
        with contextlib.suppress(OSError):
            super().record(notice)

    @contextlib.contextmanager
    def into(self, events: Path) -> Iterator[None]:
        """Record notices in this file too from now on, and at the end the error that ended the peer."""
        with contextlib.suppress(OSError):
            self.rows = JsonLines(events, go_on=True)
        try:
            yield
        except UserError as e:
            self.record(n.Ended(getattr(e, "kind", ""), str(e).splitlines()[0]))
            raise
        finally:
            with contextlib.suppress(OSError):
                self.close()
            self.rows = None
