"""How pmtrain, and packages that it can do without, get onto a machine: addresses and lines for a terminal.

pmtrain is in no package index, where somebody else could take its name: no line here asks an index for it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from protomodels_cli import __version__
from protomodels_cli.errors import OptionError

INSTALL_FROM = "install_from"  # in a run directory
ENVIRONMENT = "~/pmtrain"  # of a guest that has neither uv nor pipx
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# On Linux an index gives everybody the torch with CUDA, which is gigabytes larger: not to a machine without a card.
WITHOUT_CARD = f"$(command -v nvidia-smi > /dev/null || echo --extra-index-url {CPU_TORCH})"


@dataclass(frozen=True)
class Way:
    """Installing with one tool: its lines, and the command that then joins."""

    lines: tuple[str, ...]
    pmtrain: str


def ways(address: str) -> dict[str, Way]:
    """By tool. Each takes the torch for the machine's NVIDIA card where there is one."""
    what = shlex.quote(address)
    return {
        "pip": Way(
            (f"python3 -m venv {ENVIRONMENT}", f"{ENVIRONMENT}/bin/pip install {WITHOUT_CARD} {what}"),
            f"{ENVIRONMENT}/bin/pmtrain",
        ),
        "uv": Way((f"uv tool install --torch-backend auto {what}",), "~/.local/bin/pmtrain"),
        "pipx": Way((f'pipx install --pip-args="{WITHOUT_CARD}" {what}',), "~/.local/bin/pmtrain"),
    }


def block(way: Way, joining: str) -> str:
    """Lines to paste at once, where a line that fails is the last. Without comments, which zsh does not take there."""
    return " &&\n".join((*way.lines, f"{way.pmtrain} {joining}"))


def package(requirement: str) -> str:
    """The line that installs a package beside this pmtrain. An environment of uv has no pip."""
    import importlib.util

    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python} '{requirement}'"
    return f"{python} -m pip install '{requirement}'"


def check_address(address: str) -> str:
    """The address of a repository, an archive or a wheel from which others can install this pmtrain."""
    parts = urlsplit(address)
    if parts.username or parts.password:
        what = f"--install-from {parts.scheme}://…@{parts.hostname}: the address has a name or a password in it"
        raise OptionError(what, "name an address that others can read without it", "install_from_secret")
    if parts.scheme:
        if not re.fullmatch(r"(git\+)?(https?|ssh|file)", parts.scheme):
            raise _no_address(address)
        if not parts.scheme.startswith("git+") and re.search(r"\.git/?$", parts.path):
            return f"git+{address}"
        return address
    if not address.endswith(".whl"):
        raise _no_address(address)
    if not Path(address).is_file():
        fix = "build one with `pip wheel --no-deps .` in a checkout, or name the repository's address (git+https://…)"
        raise OptionError(f"--install-from {address}: there is no such file", fix, "install_from")
    name, version = [*Path(address).name.split("-"), "", ""][:2]
    if (name, version) != ("pmtrain", __version__):
        what = f"--install-from {address}: must be a wheel of pmtrain {__version__}, as it leads this run"
        raise OptionError(what, "build one with `pip wheel --no-deps .` in a checkout of that version", "install_from")
    return address


def _no_address(address: str) -> OptionError:
    fix = "write for example git+https://HOST/OWNER/pmtrain.git, or name a wheel (pmtrain-….whl)"
    return OptionError(f"--install-from {address}: must be the address of a repository or a wheel", fix, "install_from")


def address_of(run_dir: Path) -> str | None:
    """From where those who are invited to this run get pmtrain: as its owner said, or where this one is from."""
    try:
        return (run_dir / INSTALL_FROM).read_text(encoding="utf-8").strip() or origin()
    except OSError:
        return origin()


def origin() -> str | None:
    """From where others can install the pmtrain that runs here, as far as this installation knows; None: it does not.

    Not from where others have no right to read, as far as the address shows that."""
    found = _installed_from()
    if found is None:
        return _of_checkout(Path(__file__).parent.parent)
    url, commit = str(found.get("url", "")), dict(found.get("vcs_info") or {})
    if url.startswith("file:"):
        return _of_checkout(Path(urlsplit(url).path))
    if commit.get("vcs") == "git":
        return _public(url, str(commit.get("commit_id", "")))
    return url if url.startswith("https://") and not urlsplit(url).username else None


def _installed_from() -> dict[str, Any] | None:
    """What pip, uv or pipx wrote down (PEP 610); None in a checkout that is not installed."""
    import importlib.metadata

    try:
        text = importlib.metadata.distribution("pmtrain").read_text("direct_url.json")
        return dict(json.loads(text)) if text else {}
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return None


def _of_checkout(folder: Path) -> str | None:
    """The commit that is checked out, where its remote has it: another commit may speak another protocol."""
    url = _git(folder, "remote", "get-url", "origin")
    commit = _git(folder, "rev-parse", "HEAD")
    known = commit and _git(folder, "branch", "--remotes", "--contains", commit)
    return _public(url, commit if known else "") if url else None


def _git(folder: Path, *words: str) -> str:
    import subprocess

    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _public(url: str, commit: str) -> str | None:
    """As others reach it: by https, without the owner's name or key."""
    if short := re.fullmatch(r"(?:ssh://)?git@([^:/]+)[:/](.+)", url):
        url = f"https://{short[1]}/{short[2]}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.username or parts.password:
        return None
    return f"git+{url}" + (f"@{commit}" if commit else "")
