"""The documents say what is true: they are compared with the code, and their commands are run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from protomodels_cli import errors
from protomodels_cli.spec.document import document

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_spec_page_is_made_from_the_schema():
    assert (ROOT / "docs" / "spec.md").read_text() == document(), "run scripts/docs.sh"


def commands() -> list[str]:
    """Every pmtrain command in a code block of the README."""
    blocks = re.findall(r"```(?:bash|console)?\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if re.match(r"(\.venv/bin/)?pmtrain ", line)})


def test_the_readme_has_commands():
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_run(command, tmp_path):
    """As they stand, but small: training commands take few steps."""
    words = shlex.split(command)[1:]
    if words[0] == "lab":
        words += ["--updates", "4", "--interval", "3"] if words[1] == "grassmann" else ["--steps", "2"]
        words = [str(tmp_path / w) if w.endswith((".json", ".png")) else w for w in words]
    if words[0] == "reference":
        words += ["--steps", "2", "--run-dir", str(tmp_path / "run")]
    if words[0] == "validate":
        words = [w for word in words for w in ([str(p) for p in ROOT.glob(word)] if "*" in word else [word])]
    done = subprocess.run(
        [sys.executable, "-m", "protomodels_cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_exit_codes_are_documented():
    for name, code in vars(errors).items():
        if name.startswith("EXIT_"):
            assert re.search(rf"^\| {code} \|", README, re.MULTILINE), name


def test_layers_import_downwards_only():
    order = ["spec", "data", "model", "wire", "observe", "lab", "cli"]
    # model/ and data/ are one layer; the reference reads batches, and nothing in data/ knows the model
    for file in (ROOT / "protomodels_cli").rglob("*.py"):
        layer = file.relative_to(ROOT / "protomodels_cli").parts[0]
        if layer in order:
            for used in re.findall(r"(?:from|import) protomodels_cli\.(\w+)", file.read_text()):
                assert used not in order or order.index(used) <= order.index(layer), f"{file.name} imports {used}"
