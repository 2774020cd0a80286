"""Packages of requirements/all.txt, which only `scripts/test.sh --all` installs."""

from __future__ import annotations

from typing import Any

import pytest


def heavy(package: str) -> Any:
    """The module; without it the test is skipped. test_pins.py fails where its list was installed and it is absent."""
    return pytest.importorskip(package, reason=f"{package} is not installed: scripts/test.sh --all has it")
