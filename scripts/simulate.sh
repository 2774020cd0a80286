#!/usr/bin/env bash
# A run in virtual time, under every fault that we know of: so many seeds, on all cores. See tests/simulation.py.
#   scripts/simulate.sh 10000
#   scripts/simulate.sh --seed 7 --trace
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
PYTHONPATH=.:tests exec .venv/bin/python tests/simulation.py "$@"
