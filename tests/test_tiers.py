"""Tiers: the default one has every value of every table, `--all` has everything, and long tests are named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tiers import table

ROOT = Path(__file__).parent.parent
ROWS = [*product(range(7), "abc", (True, False))]
CONFTEST = """
import sys
import pytest
sys.path.insert(0, {tests!r})
pytest_plugins = ["tier_hooks"]
SECONDS = {{"test_slow": 21.0, "test_long": 119.0}}  # that these tests seem to take

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.duration = SECONDS.get(item.originalname, 0.0) if call.when == "call" else 0.0
    return report
"""
TESTS = """
import pytest
from tiers import table

@pytest.mark.parametrize(("a", "b"), table([(a, b) for a in range(4) for b in range(4)]))
def test_rows(a, b): pass

@pytest.mark.full
def test_long(): pass

def test_slow(): pass
"""


def test_the_default_rows_have_every_value_of_every_column():
    rows = table(ROWS)
    assert [row.values for row in rows] == ROWS
    default = [row.values for row in rows if not row.marks]
    assert len(default) < len(ROWS) / 3
    assert [set(values) for values in zip(*default, strict=True)] == [set(range(7)), set("abc"), {True, False}]


@pytest.mark.parametrize(("arguments", "passed", "named"), [([], range(5, 9), ["test_slow"]), (["--all"], [18], [])])
def test_a_tier_runs_its_tests_and_names_those_that_take_too_long(tmp_path, arguments, passed, named):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), *arguments, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, closing = done.stdout.splitlines()
    assert int(closing.split()[0]) in passed, done.stdout
    assert [line.split()[-1].rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line] == named


TREE = """
from pathlib import Path

import pytest

FAILURES = {failures}


def fails(name: str) -> None:
    mark = Path(__file__).with_name(name)
    count = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (count + 1))
    assert count >= FAILURES


@pytest.mark.parametrize("number", range({tests}))
def test_computes(number: int) -> None:
    fails(f"computes-{{number}}")


@pytest.mark.waiting
def test_waits() -> None:
    fails("waits")
"""
SETTINGS = """
[tool.mypy]
files = ["tests"]
[tool.pytest.ini_options]
markers = ["waiting: waits", "cuda: needs a card"]
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("tests", "failures", "code", "runs"),
    [(2, 1, 0, 2), (2, 0, 0, 1), (2, 2, 1, 2), (13, 1, 1, 1)],
    ids=["failed once", "never failed", "failed again", "too many failed"],
)
def test_what_failed_while_others_ran_is_run_once_more_alone(tmp_path, tests, failures, code, runs):
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("#!/bin/sh\n")
    (tmp_path / "scripts" / "setup.sh").chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "tests" / "test_some.py").write_text(TREE.format(tests=tests, failures=failures).lstrip())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([tmp_path / "scripts" / "test.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert [len((tmp_path / "tests" / name).read_text()) for name in ("computes-0", "waits")] == [
        runs,
        2 if failures else 1,
    ]
    named = [line for line in done.stdout.splitlines() if line.strip().startswith('"tests/test_some.py::')]
    assert len(named) == (tests + 1 if runs == 2 else 1 if failures else 0)
