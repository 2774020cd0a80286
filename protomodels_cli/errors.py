"""Errors that a user can mend: shown as they are, without a traceback, with a documented exit code."""

from __future__ import annotations

from typing import Any

EXIT_BUG = 1  # a traceback: please report it
EXIT_SPEC = 2  # a bad spec or command line
EXIT_OUTSIDE = 3  # files, disk, devices or missing packages: something outside pmtrain
EXIT_STOPPED = 4  # the run stopped itself and says why
EXIT_REFUSED = 5  # the coordinator or a peer said no: token, fingerprint, version, spec
EXIT_INTERRUPTED = 130  # Ctrl-C


class UserError(Exception):
    """What is wrong and, on a line of its own, the fix."""

    exit_code = EXIT_OUTSIDE

    def __init__(self, what: str, fix: str, *, kind: str = ""):
        super().__init__(f"{what}\n    fix:  {fix}")
        self.kind = kind  # what programs and tests read

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), str(self), self.kind)


def _rebuilt(error_type: type[UserError], text: str, kind: str) -> UserError:
    """An error that came from another process."""
    error = error_type.__new__(error_type)
    Exception.__init__(error, text)
    error.kind = kind
    return error


class OptionError(UserError):
    """A command-line option that cannot be."""

    exit_code = EXIT_SPEC


class RunStopped(UserError):
    """Training cannot go on."""

    exit_code = EXIT_STOPPED
