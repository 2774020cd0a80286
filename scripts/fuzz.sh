#!/usr/bin/env bash
# So many executions of the decoders of everything that others send, over all cores; a failure names how it is found again.
#   scripts/fuzz.sh 10_000_000
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
exec .venv/bin/python tests/fuzzing.py "$@"
