#!/usr/bin/env bash
# So many executions of the decoders of everything that others send, over all cores; or of calls of a live coordinator's and
# a live peer's rpcs. A failure names how it is found again.
#   scripts/fuzz.sh 10_000_000
#   scripts/fuzz.sh rpcs 20_000
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
if [ "${1:-}" = rpcs ]; then exec .venv/bin/python tests/fuzzing_rpcs.py "${@:2}"; fi
exec .venv/bin/python tests/fuzzing.py "$@"
