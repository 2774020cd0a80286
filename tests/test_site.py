"""The docs as a site: every page is on it, and no link in it, or in the pages beside it, leads nowhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from heavy import heavy
from starting import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def leaves(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(one)


def test_every_page_is_in_the_navigation_once():
    assert sorted(leaves(SITE["nav"])) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def anchors(page: Path) -> set[str]:
    """As GitHub names headings; the site's own are checked when it is built."""
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?s)```.*?```", "", page.read_text()))
    kept = (re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", [*BESIDE, *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    """Pictures too. A page of the site links to no file outside docs/: the site does not have it."""
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert page in BESIDE or file.is_relative_to(ROOT / "docs"), target
        assert not heading or heading in anchors(file), target


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path):
    heavy("zensical")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / SITE["site_dir"]
    for page in PAGES:
        html = (built / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text()
        loaded = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=[\"']?(https?://[^\"' >]+)", html)
        assert [url for url in loaded if "canonical" not in url] == [], "the site asks another host"
