#!/usr/bin/env bash
# Makes .venv with pmtrain and everything it needs, at the versions of constraints.txt. Does nothing when it is there.
#   scripts/setup.sh          what a user needs (with the lab's plots)
#   scripts/setup.sh test     what scripts/test.sh needs as well
#   scripts/setup.sh coordinator   what leads a run, without torch: a machine that only coordinates is a cheap server
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-lab}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "pmtrain needs Python 3.11 or newer, and $python is $("$python" -V 2>&1)" >&2
  echo "    fix:  PYTHON=/path/to/python3.11 $0" >&2
  exit 3
}
stamp=.venv/.installed-$extra
if [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! constraints.txt -nt "$stamp" ] \
  && [ ! coordinator-requirements.txt -nt "$stamp" ]; then exit 0; fi
echo "installing into .venv (once) …" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@" -c constraints.txt; }
if [ "$extra" = coordinator ]; then
  pip install -r coordinator-requirements.txt
  pip install --no-deps -e .
else
  # torch first and by its exact version: any looser request may fetch gigabytes of CUDA packages
  pip install "$(grep '^torch==' constraints.txt)"
  pip install -e ".[$extra]"
fi
# pip compiles all packages but this one, which is edited in place: where starts may not write bytecode
# (PYTHONDONTWRITEBYTECODE, a read-only checkout), each would compile it again, a third of a coordinator's restart.
.venv/bin/python -m compileall -q protomodels_cli
touch "$stamp"
