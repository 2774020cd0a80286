#!/usr/bin/env bash
# The demo on a fresh machine: installs into .venv where that is not done yet, then trains for about two minutes.
#   scripts/demo.sh                    four peers on this machine
#   scripts/demo.sh --json demo.json   arguments go to `pmtrain demo`; --json alone writes demo.json
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
if [ "${*: -1}" = --json ]; then set -- "$@" demo.json; fi
exec .venv/bin/pmtrain demo "$@"
