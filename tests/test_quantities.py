"""Durations, sizes, rates and counts as people write them."""

from __future__ import annotations

import math
import re
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.quantities import count, duration, figures, plural, rate, size, until_when


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00042, "0.42 ms"),
        (0.35, "350 ms"),
        (0.9996, "1 s"),
        (3.456, "3.46 s"),
        (5, "5 s"),
        (59.4, "59.4 s"),
        (59.7, "1 min"),
        (90, "1 min 30 s"),
        (213, "3 min 33 s"),
        (599.6, "10 min"),
        (1420, "24 min"),
        (3570, "1 h"),
        (3900, "1 h 05 min"),
        (7200, "2 h"),
        (86400, "24 h"),
        (172_800, "2 d"),
        (200_000, "2 d 08 h"),
        (1e9, "11,574 d 02 h"),
        (math.inf, "forever"),
        (math.nan, "unknown"),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 * 1024, "1,023 KiB"),
        (3 << 30, "3 GiB"),
        (int(1.5 * 2**40), "1.5 TiB"),
    ],
)
def test_sizes(n: int, text: str):
    assert size(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1 k"),
        (1234567, "1.23 M"),
        (8.03e9, "8.03 B"),
        (6e13, "60 T"),
        (2.5e18, "2,500 P"),
    ],
)
def test_counts(n: float, text: str):
    assert count(n) == text


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (6e13, "FLOP/s", "60 TFLOP/s"),
        (2e10, "FLOP/s", "20 GFLOP/s"),
        (500, "FLOP/s", "500 FLOP/s"),
        (1234, "tok/s", "1.23k tok/s"),
        (87.65, "tok/s", "87.7 tok/s"),
    ],
)
def test_rates(n: float, unit: str, text: str):
    assert rate(n, unit) == text


def test_plurals():
    assert [plural(n, "step") for n in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]


@given(st.floats(1e-9, 1e15))
def test_nothing_is_ever_written_with_an_exponent_and_three_figures_are_right(x: float):
    for text in (figures(x), duration(x), size(x), count(x), rate(x, "FLOP/s")):
        assert not re.search(r"\de[+-]?\d", text)
    assert float(figures(x).replace(",", "")) == pytest.approx(x, rel=0.0051)


def test_when_a_rest_ends():
    soon, later = (time.time() + seconds for seconds in (3600, 5 * 86_400))
    assert until_when(soon) == f"until {datetime.fromtimestamp(soon):%H:%M}"
    assert until_when(later) == f"until {datetime.fromtimestamp(later):%d %b %H:%M}"
