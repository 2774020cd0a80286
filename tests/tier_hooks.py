"""pytest's hooks for the tiers: `--all` selects every test; without it, tests marked `full` are left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every test and every row, not the default tier alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests that take longer than their tier allows."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    longest = tiers.LONGEST["all" if config.getoption("--all") else "default"]
    if late := [(test, took) for test, took in seconds.most_common() if took > longest]:
        terminalreporter.section(f"longer than a test of this tier may take ({longest:g} s)")
        for test, took in late:
            terminalreporter.line(f"{took:6.1f} s  {test}")
