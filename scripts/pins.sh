#!/usr/bin/env bash
# Checks the pinned lists in requirements/ without a network; `refresh` makes them again. scripts/refresh_pins.py says how.
#   scripts/pins.sh
#   scripts/pins.sh refresh numpy
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
exec .venv/bin/python scripts/refresh_pins.py "$@"
