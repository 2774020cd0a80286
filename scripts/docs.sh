#!/usr/bin/env bash
# Writes docs/spec.md from the schema. A test compares the two.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/python -m protomodels_cli.spec.document > docs/spec.md
