"""Amounts on the command line: 24gib, 20mbit, 8h, as in specs. A bare number is the spelling of before, with a hint."""

from __future__ import annotations

import sys
from collections.abc import Callable

from protomodels_cli.errors import OptionError

LEAST_MEMORY = 1 << 20


def memory_of(text: str | None, option: str = "--memory") -> int | None:
    """In bytes; bare numbers were GiB."""
    if text is None:
        return None
    check_memory(text, option)
    from protomodels_cli.spec import units

    return int(_amount(text, option, units.bytes_of, "gib", "24gib or 512mib"))


def check_memory(text: str, option: str = "--memory") -> None:
    """Without the hint."""
    from protomodels_cli.spec import units

    _, found = _read(text, option, units.bytes_of, "gib", "24gib or 512mib")
    if found < LEAST_MEMORY:
        raise OptionError(f"{option} {text}: must be at least 1mib", "write for example 24gib or 512mib", "amount")


def seconds_of(text: str | None, option: str) -> float | None:
    """Bare numbers were hours."""
    if text is None:
        return None
    from protomodels_cli.spec import units

    return _amount(text, option, units.long_seconds, "h", "8h, 20min or 2d")


def bits_of(text: str, option: str) -> float:
    """A second; 0 and none are no limit. Bare numbers were Mbit."""
    from protomodels_cli.spec import units

    return 0.0 if text in ("none", "0") else _amount(text, option, units.bits_per_second, "mbit", "20mbit or none")


def _amount(text: str, option: str, parse: Callable[[str], float], before: str, example: str) -> float:
    written, found = _read(text, option, parse, before, example)
    if written != text:
        hint = (
            f"{option} {text} is taken as {written}, as before; write {option} {written}: the next version asks for it"
        )
        print(hint, file=sys.stderr)
    return found


def _read(text: str, option: str, parse: Callable[[str], float], before: str, example: str) -> tuple[str, float]:
    """The amount with its unit, and as a number."""
    try:
        float(text)
    except ValueError:
        written = text
    else:
        written = f"{text}{before}"
    try:
        return written, parse(written)
    except ValueError as e:
        raise OptionError(f"{option} {text}: {e}", f"write for example {example}", "amount") from None
