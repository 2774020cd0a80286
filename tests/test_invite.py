"""`pmtrain invite`: what a friend pastes installs pmtrain and joins, on a machine with nothing but Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import segno
from conftest import make_spec
from starting import pmtrain
from test_run import coordinator, ends
from waiting import wait_for
from wheels_here import our_wheel, wheels_of_dependencies

from protomodels_cli import __version__, installing
from protomodels_cli.cli.invitation import Invitation
from protomodels_cli.errors import OptionError
from protomodels_cli.wire.join_link import JoinLink

LINK = JoinLink("203.0.113.7", 7420, "t" * 22, "f" * 43)
ADDRESS = "git+https://example.org/ann/pmtrain.git"
MADE = Invitation("friends & co", ADDRESS, f"join '{LINK}'", None, None)


@pytest.mark.parametrize("tool", ["pip", "uv", "pipx"])
@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_every_block_is_read_by_every_shell_and_has_no_comment(tool: str, shell: str):
    """An interactive zsh takes # for a command."""
    block = MADE.blocks[tool]
    assert not any(line.lstrip().startswith("#") for line in block.splitlines())
    assert block.splitlines()[-1].endswith(f"pmtrain join '{LINK}'")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", "-c", block], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("git+https://example.org/a/b.git", "git+https://example.org/a/b.git"),
        ("https://example.org/a/b.git", "git+https://example.org/a/b.git"),
        ("git+ssh://example.org/a/b", "git+ssh://example.org/a/b"),
        ("https://example.org/pmtrain-9-py3-none-any.whl", "https://example.org/pmtrain-9-py3-none-any.whl"),
        (f"pmtrain-{__version__}-py3-none-any.whl", f"pmtrain-{__version__}-py3-none-any.whl"),
        ("https://ann:secret@example.org/b.git", "install_from_secret"),
        ("pmtrain", "install_from"),
        ("ftp://example.org/b.git", "install_from"),
        ("pmtrain-0.0.0-py3-none-any.whl", "install_from"),
        ("other-1-py3-none-any.whl", "install_from"),
        ("absent.whl", "install_from"),
    ],
)
def test_the_address_is_one_from_which_others_can_install_this_version(tmp_path, monkeypatch, address: str, found: str):
    monkeypatch.chdir(tmp_path)
    for name in (f"pmtrain-{__version__}", "pmtrain-0.0.0", "other-1"):
        Path(f"{name}-py3-none-any.whl").touch()
    if "install_from" not in found:
        assert installing.check_address(address) == found
        return
    with pytest.raises(OptionError) as error:
        installing.check_address(address)
    assert error.value.kind == found
    assert "secret" not in str(error.value)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("remote", "public"),
    [
        ("https://example.org/a/b.git", "git+https://example.org/a/b.git"),
        ("git@example.org:a/b.git", "git+https://example.org/a/b.git"),
        ("ssh://git@example.org/a/b.git", "git+https://example.org/a/b.git"),
        ("https://ann:secret@example.org/a/b.git", None),
        ("/home/ann/b", None),
        (None, None),
    ],
)
def test_a_checkout_is_installed_from_its_remote(tmp_path: Path, remote: str | None, public: str | None):
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "one")
    if remote is not None:
        git(tmp_path, "remote", "add", "origin", remote)
    assert installing._of_checkout(tmp_path) == public, "the remote has no commit: its branch is installed"
    if public is not None:
        commit = git(tmp_path, "rev-parse", "HEAD")
        git(tmp_path, "update-ref", "refs/remotes/origin/main", commit)
        assert installing._of_checkout(tmp_path) == f"{public}@{commit}", "others get the same protocol"


class Page(HTMLParser):
    """What a browser would show in <pre>, and what it would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.shown: list[str] = []
        self.fetched: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "pre"
        self.shown += [""] * self._inside
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.shown[-1] += data


def test_the_page_shows_every_block_and_fetches_nothing():
    made = Invitation("<b>&", ADDRESS, f"join '{LINK}' --name '<script>'", "<script>", "abc123")
    page = Page(made.page())
    assert page.shown == list(made.blocks.values())
    assert page.fetched == []
    assert made.page().count("<script>") == 1, "our own"
    assert made.page().count("<svg") == 1


def test_the_code_in_the_terminal_is_the_block():
    """Each character is two modules, one above the other; light ones are drawn."""
    rows: list[list[bool]] = []
    for line in MADE.code().splitlines():
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        rows += [[c not in "█▀" for c in line], [c not in "█▄" for c in line]]
    matrix = [[bool(module) for module in row] for row in segno.make(MADE.blocks["pip"], micro=False).matrix]
    border, size = 4, len(matrix)  # so many light ones a reader needs around it
    assert len(rows) in (size + 2 * border, size + 2 * border + 1)
    assert [row[border : border + size] for row in rows[border : border + size]] == matrix
    around = [*rows[:border], *rows[border + size : size + 2 * border], *(row[:border] for row in rows[:size])]
    assert not any(any(row) for row in around)


def test_an_invitation_for_one_friend_and_for_all(tmp_path: Path):
    with coordinator(make_spec(stages=2, steps=2), tmp_path) as (leader, link):
        for words in (["--for", ""], ["--for", "x" * 61], ["--install-from", "pmtrain"]):
            assert pmtrain("invite", "run", *words, cwd=tmp_path).returncode == 2
        named = pmtrain("invite", "--install-from", ADDRESS, "--for", "Ann B", "--format", "json", cwd=tmp_path)
        assert named.returncode == 0, named.stderr
        found = json.loads(named.stdout)
        own = JoinLink.parse(re.findall(r"pm://[^' ]+", found["join"])[0])
        assert own.token != JoinLink.parse(link).token
        assert found["join"].endswith("--name 'Ann B'")
        tokens = json.loads(pmtrain("token", "list", "--format", "json", cwd=tmp_path).stdout)["tokens"]
        assert [one["uses"] for one in tokens if one["id"] == found["token"]] == [1]
        again = json.loads(pmtrain("invite", link, "--format", "json", cwd=tmp_path).stdout)
        assert (again["address"], again["token"]) == (ADDRESS, None), "it is remembered"
        assert link in again["join"]
        address, _, key = (tmp_path / "run" / "page").read_text().split()[0].partition("?key=")
        request = Request(f"{address}owner.json", headers={"Authorization": f"Bearer {key}"})
        wait_for(lambda: json.load(urlopen(request)) == {"join": again["blocks"]["pip"]}, "the page shows the block")
        written = pmtrain("invite", "--html", "page.html", "--qr", cwd=tmp_path)
        assert Page((tmp_path / "page.html").read_text()).shown == list(again["blocks"].values())
        assert (tmp_path / "page.html").stat().st_mode & 0o077 == 0
        assert again["blocks"]["uv"] in written.stdout
        leader.kill()


@pytest.mark.full
def test_in_a_clean_home_the_block_ends_in_a_peer_that_trains(tmp_path: Path):
    """Nothing is there but Python: no variable, no file at home, no package. Packages come from a folder of wheels."""
    for name in ("wheels", "links", "source", "home"):
        (tmp_path / name).mkdir()
    wheels_of_dependencies(tmp_path / "wheels", tmp_path / "links")
    wheel = our_wheel(tmp_path / "home", tmp_path / "source")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    env = {"HOME": str(tmp_path / "home"), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_COMPILE": "1"}
    env |= {"PIP_CONFIG_FILE": os.devnull}
    with coordinator(make_spec(stages=1, steps=3), tmp_path) as (leader, _):
        words = ("invite", "--install-from", wheel.name, "--for", "Ann", "--format", "json")
        made = pmtrain(*words, cwd=tmp_path / "home")
        assert made.returncode != 0, "a run is looked for in this folder"
        made = pmtrain(*words[:1], tmp_path / "run", *words[1:], cwd=tmp_path / "home")
        assert made.returncode == 0, made.stderr
        block = json.loads(made.stdout)["blocks"]["pip"]
        paste = ["/bin/sh", "-c", block]
        done = subprocess.run(paste, cwd=tmp_path / "home", env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        code, said = ends(leader)
    assert code == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows if row["kind"] == "peer_joined"] == ["Ann"]
    assert Path(tmp_path / "home" / "pmtrain" / "bin" / "pmtrain").exists()
