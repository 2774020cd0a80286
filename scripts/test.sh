#!/usr/bin/env bash
# Lint, types and tests in one command, on a fresh machine too: it makes its own environment first.
#   scripts/test.sh                 everything
#   scripts/test.sh tests/test_spec.py -k contradictions     arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
.venv/bin/ruff format --check --quiet .
.venv/bin/ruff check --quiet .
.venv/bin/mypy --no-error-summary
exec .venv/bin/python -m pytest -n 3 "$@"  # many tests wait for processes: more of them than cores
