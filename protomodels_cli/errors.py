"""Errors that a user can mend: shown as they are, without a traceback, with a documented exit code."""

from __future__ import annotations

from typing import Any

EXIT_SPEC = 2  # a bad spec or command line
EXIT_OUTSIDE = 3  # files, disk, devices or missing packages: something outside pmtrain
EXIT_STOPPED = 4  # the run stopped itself and says why
EXIT_REFUSED = 5  # the coordinator or a peer said no: token, fingerprint, version, spec
EXIT_INTERRUPTED = 130  # Ctrl-C


class UserError(Exception):
    """What is wrong and, on a line of its own, the fix. `kind` names the error to programs; it is never shown."""

    exit_code = EXIT_OUTSIDE
    kind = ""

    def __init__(self, what: str, fix: str, kind: str = ""):
        super().__init__(f"{what}\n    fix:  {fix}")
        self.kind = kind or self.kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), str(self), vars(self))


def _restored(error_type: type[UserError], text: str, facts: dict[str, Any]) -> UserError:
    """An error that another process raised; the constructors of subclasses take other arguments."""
    error = error_type.__new__(error_type)
    Exception.__init__(error, text)
    vars(error).update(facts)
    return error


class OptionError(UserError):
    """A command-line option with a value that cannot be used."""

    exit_code = EXIT_SPEC


class RunStopped(UserError):
    """Training cannot go on."""

    exit_code = EXIT_STOPPED


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, shortly; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
