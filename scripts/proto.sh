#!/usr/bin/env bash
# Generates the Python code of proto/ below the folder given (default: this repository). A test compares the two.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
out=${1:-.}
exec .venv/bin/python -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/protomodels_cli/wire/pb/pmtrain.proto
