#!/usr/bin/env bash
# Builds the docs as a site into out/site, and fails where a link leads nowhere.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh all
exec .venv/bin/zensical build --strict
