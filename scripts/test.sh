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
workers=6
case "${1-}" in
  --all) tier=(--all) list=all workers=4; shift ;;
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
# wait for processes: six of them keep two cores busy, and of the long ones of --all four.
logs=$(mktemp -d)
trap 'rm -rf "$logs"; kill $(jobs -p) 2>/dev/null || true' EXIT
job() { $pytest ${tier[@]+"${tier[@]}"} -o cache_dir="$logs/cache-$1" "${@:2}"; }
# On a machine that is busy with other things a test can run out of time. So a few failed tests run once more, one by one
# and with nothing else, and are named: only what fails again fails the whole.
again() {
  [ "$2" = 1 ] || return "$2"
  local failed="$logs/cache-$1/v/cache/lastfailed"
  [ -s "$failed" ] && [ "$(grep -c '::' "$failed")" -le 12 ] || return 1
  echo "== failed while other tests ran; once more, alone:"
  grep '::' "$failed"
  job "$1" "${@:3}" --last-failed --last-failed-no-failures=none
}
waits=$(grep -l 'mark\.waiting' tests/test_*.py)
.venv/bin/mypy --no-error-summary > "$logs/types" 2>&1 & types=$!
job waiting -m "waiting and not cuda" -n 5 $waits > "$logs/waiting" 2>&1 & waiting=$!
failed=0 computed=0 waited=0
job computing -m "not waiting" -n "$workers" --dist worksteal || computed=$?
echo "== tests that wait (leases, timeouts, retries)"
wait "$waiting" || waited=$?
cat "$logs/waiting"
wait "$types" || { failed=1; echo "== types"; cat "$logs/types"; }
again computing "$computed" -m "not waiting" || failed=1
again waiting "$waited" -m "waiting and not cuda" $waits || failed=1
exit "$failed"
