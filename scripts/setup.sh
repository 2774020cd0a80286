#!/usr/bin/env bash
# Makes .venv with pmtrain and the pinned packages of requirements/; pip resolves nothing. It does nothing where all is
# there, adds lists that are missing or have changed, and can be interrupted and run again.
#   scripts/setup.sh               what a user needs (with the lab's plots)
#   scripts/setup.sh coordinator   what leads a run, without torch: a machine that only coordinates is a cheap server
#   scripts/setup.sh peer          what joins one
#   scripts/setup.sh test          what scripts/test.sh needs as well
#   scripts/setup.sh all           what scripts/test.sh --all and scripts/site.sh need as well
set -euo pipefail
trap 'exit 130' INT  # pip answers Ctrl-C as it answers an error, and this would go on with the next list
cd "$(dirname "$0")/.."

peer="pip torch cuda coordinator peer"
case ${1:-user} in
  coordinator) lists="pip coordinator" ;;
  peer) lists=$peer ;;
  user) lists="$peer user" ;;
  test) lists="$peer user test" ;;
  all) lists="$peer user test all" ;;
  *) sed -n 's/^#   //p' "$0" >&2; exit 2 ;;
esac

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2> /dev/null; }
venv=$(version_of .venv/bin/python) || venv=  # none, or its Python is gone

# A list is installed if the copy of it that was made afterwards is the same. pyproject.toml stands for pmtrain itself.
installed=.venv/installed
if [ -z "$venv" ]; then rm -rf $installed; fi
todo=
for list in $lists; do
  if [[ "$todo $list" = *" torch cuda" ]] || ! cmp -s "requirements/$list.txt" $installed/$list.txt; then todo+=" $list"; fi
done
if [ -z "$todo" ] && cmp -s pyproject.toml $installed/pyproject.toml; then exit 0; fi

refuse() { printf '%s\n    fix:  %s\n' "$1" "$2" >&2; exit 3; }

python=${PYTHON:-$([ "$venv" ] && echo .venv/bin/python || echo python3)}
version=$(version_of "$python") || refuse "$python is no Python that starts" "PYTHON=/path/to/python3.11 $0"
minor=${version%.*}
promised=$(sed -n 's/.*:: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
oldest=${promised%%$'\n'*} newest=${promised##*$'\n'} broken=$(sed -n 's/^requires-python.*!=\(.*\)"/\1/p' pyproject.toml)
if [ "$version" = "$broken" ] || ! grep -qx "$minor" <<< "$promised"; then
  refuse "pmtrain needs Python $oldest to $newest${broken:+ (not $broken)}, and $python is $version" \
    "PYTHON=/path/to/python$newest $0"
fi
[ "${venv:+${venv%.*}}" = "${venv:+$minor}" ] ||
  refuse ".venv has Python $venv, and PYTHON is Python $version" "rm -r .venv, or leave PYTHON out"

# pip writes INSTALLER into a package's RECORD last. One without it was interrupted, and pip would take it for installed.
for info in .venv/lib/python3*/site-packages/*.dist-info; do
  if [ -d "$info" ] && ! grep -qs "^${info##*/}/INSTALLER," "$info/RECORD"; then rm -r "$info"; fi
done
if [ -z "$venv" ] || ! compgen -G ".venv/lib/python$minor/site-packages/pip-*.dist-info" > /dev/null; then
  echo "making .venv with Python $version …" >&2
  "$python" -c 'import ensurepip' 2> /dev/null || refuse "$python lacks ensurepip, which makes .venv" \
    "on Debian and Ubuntu: sudo apt install python$minor-venv; elsewhere PYTHON=/path/to/another/python $0"
  "$python" -m venv $([ "$venv" ] || echo --clear) .venv
fi

count=$(wc -w <<< "$todo pmtrain") number=0
begin() { number=$((number + 1)); echo "[$number/$((count))] $1 … ($SECONDS s)" >&2; }
# On a terminal pip shows its progress.
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" --no-deps $([ -t 2 ] || echo --quiet) >&2; }
# A coordinator's packages are compiled here. The others are many, and most of their modules are never imported: their
# bytecode is written when they are, torch's below.
install() {
  rm -f "$installed/$list.txt"  # until it is whole again
  pip install --require-hashes --no-build-isolation --use-pep517 $([ "$list" = coordinator ] || echo --no-compile) -r "$1"
}
# pip prefers files whose hash an index tells to newer versions. A CPU build that it knows of, often in a folder, is asked
# for by name: it spares gigabytes of CUDA.
install_cpu_torch() {
  sed 's/^torch==[^ ]*/&+cpu/' requirements/torch.txt > .venv/torch-cpu.txt
  install .venv/torch-cpu.txt 2> /dev/null
}
check_index() { .venv/bin/python scripts/index_reachable.py || exit 3; }
# torch's builds differ: each says itself whether it needs packages of cuda.txt.
wants_cuda() {
  .venv/bin/python - << 'END'
import importlib.metadata, re
from pip._vendor.packaging.requirements import Requirement
needs = map(Requirement, importlib.metadata.requires("torch") or ())
names = {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
print(*names.intersection(re.findall(r"^[a-z][^= ]*", open("requirements/cuda.txt").read(), re.MULTILINE)))
END
}

mkdir -p $installed
if [ "$todo" ]; then check_index; fi
for list in $todo; do
  if [ "$list" = cuda ] && [ -z "$(wants_cuda)" ]; then
    begin "cuda: this torch needs none"
  else
    begin "$list: $(sed -n '3s/^# //p' "requirements/$list.txt")"
    if [ "$list" = torch ]; then rm -f $installed/cuda.txt; fi  # which another torch may need
    { [ "$list" = torch ] && install_cpu_torch; } || install "requirements/$list.txt" || {
      check_index
      refuse "pip could not install requirements/$list.txt" "see above; $0 goes on from there"
    }
  fi
  cp "requirements/$list.txt" "$installed/$list.txt"
done
begin pmtrain
PYTHONWARNINGS=ignore pip install --no-build-isolation -e .
# Where starts may not write bytecode (PYTHONDONTWRITEBYTECODE, a read-only checkout), each would compile pmtrain again, a
# third of a coordinator's restart.
.venv/bin/python -m compileall -q protomodels_cli
if [[ " $todo " = *" torch "* ]]; then env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import torch'; fi
cp pyproject.toml $installed/pyproject.toml
echo "installed in $SECONDS s" >&2
