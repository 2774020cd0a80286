"""Parsing quantities with units: `80mbit`, `25ms`, `20min`, `10tflops`."""

from __future__ import annotations

import re

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEEDS = {"mflops": 1e6, "gflops": 1e9, "tflops": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = {"b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_LONG_TIMES = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def bits_per_second(text: str) -> float:
    return _quantity(text, _RATES, "a bandwidth like 80mbit")


def bytes_of(text: str) -> float:
    return _quantity(text, _SIZES, "a size like 24gib")


def flops_per_second(text: str) -> float:
    return _quantity(text, _SPEEDS, "a speed like 10tflops")


def seconds(text: str) -> float:
    return _quantity(text, _TIMES, "a time like 25ms")


def long_seconds(text: str) -> float:
    """Of what takes longer than a message."""
    return _quantity(text, _LONG_TIMES, "a time like 20min")


def _quantity(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError(f"must be {wanted} ({', '.join(units)})")
    return float(found[1]) * units[found[2]]
