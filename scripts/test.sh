#!/usr/bin/env bash
# Lint, types and tests in one command. It makes its own environment first.
#   scripts/test.sh            the default tier: lint, types, unit and process tests; ten minutes on two cores
#   scripts/test.sh --all      every test and every row of every table, as CI runs them
#   scripts/test.sh --gpu      the tests that need a CUDA device, four at a time
#   scripts/test.sh [--all] tests/test_spec.py -k contradictions     any other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
tier=()
list=test
case "${1-}" in
  --all) tier=(--all) list=all; shift ;;
  --gpu) tier=(-m cuda); shift ;;
esac
scripts/setup.sh "$list"
pytest=".venv/bin/python -m pytest"
unset PYTHONDONTWRITEBYTECODE  # pytest would rewrite all test files again in every process

if [ "${tier[0]-}" = -m ]; then
  $pytest ${tier[@]+"${tier[@]}"} -n 4 "$@"
  exit
fi
.venv/bin/ruff format --check --quiet .
.venv/bin/ruff check --quiet .
if [ $# -gt 0 ]; then
  .venv/bin/mypy --no-error-summary
  $pytest ${tier[@]+"${tier[@]}"} -n 3 "$@"
  exit
fi

# Three jobs at a time: tests that compute, tests that wait (many of them), and the type checker. Tests that compute also
# wait for processes: four of them keep two cores busy.
logs=$(mktemp -d)
trap 'rm -rf "$logs"; kill $(jobs -p) 2>/dev/null || true' EXIT
.venv/bin/mypy --no-error-summary > "$logs/types" 2>&1 & types=$!
$pytest ${tier[@]+"${tier[@]}"} -m "waiting and not cuda" -n 5 $(grep -l 'mark\.waiting' tests/test_*.py) > "$logs/waiting" 2>&1 & waiting=$!
failed=0
$pytest ${tier[@]+"${tier[@]}"} -m "not waiting" -n 4 --dist worksteal || failed=1
echo "== tests that wait (leases, timeouts, retries)"
wait "$waiting" || failed=1
cat "$logs/waiting"
wait "$types" || { failed=1; echo "== types"; cat "$logs/types"; }
exit "$failed"
