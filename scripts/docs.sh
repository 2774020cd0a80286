#!/usr/bin/env bash
# Writes docs/spec.md from the schema and docs/json.md from what commands print. Tests compare them.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/python -m protomodels_cli.spec.document > docs/spec.md
.venv/bin/python -m protomodels_cli.cli.json_document > docs/json.md
