"""Every command in README and docs is run by a test, or says why not: the table is in documented_commands.py."""

from __future__ import annotations

import ast
import re

from documented_commands import NOT_RUN, ROOT, RUN, documented, fits, lines_of, places


def test_every_documented_line_has_one_place():
    found = documented()
    assert len(found) > 30
    assert {line: sorted(pages) for line, pages in found.items() if len(places(line)) != 1} == {}


def test_nothing_is_in_the_table_that_no_page_has():
    entries = [entry for part in (RUN, NOT_RUN) for entries in part.values() for entry in entries]
    assert [entry for entry in entries if not any(fits(line, entry) for line in documented())] == []


MARK = "<!-- not run by a test: … -->\n"
FENCED = re.compile(r"(?ms)^(?P<mark><!-- not run by a test: [^\n]+ -->\n)?```(?P<kind>\w*)\n(?P<lines>.*?)^```")
COMMAND = re.compile(r"(?m)^(?:pmtrain [a-z]+(?: |$)|(?:scripts/|docker |kubectl |sudo |pip |sky ).*)")


def unlisted(page: str) -> list[str]:
    """Commands in blocks that neither this table nor a mark above them accounts for."""
    blocks = [found for found in FENCED.finditer(page) if found["kind"] != "bash" and not found["mark"]]
    return [line for found in blocks for line in COMMAND.findall(found["lines"])]


def test_no_command_hides_in_a_block_of_another_kind():
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    assert {page.name: lines for page in pages if (lines := unlisted(page.read_text(encoding="utf-8")))} == {}
    hidden = "```\npmtrain runs\n```\n"
    assert unlisted(hidden) == ["pmtrain runs"]
    assert not unlisted(MARK + hidden)
    assert not unlisted(hidden.replace("```\n", "```bash\n", 1))


def test_the_tests_that_run_them_are_there():
    there = set()
    for file in (ROOT / "tests").glob("test_*.py"):
        there |= {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
    assert set(RUN) <= there


def test_the_search_for_lines_finds_them():
    page = "```bash\n# why\n.venv/bin/pmtrain runs   # all\n$ a --b \\\n  c\n```\n\n```\nnot this\n```\n"
    assert list(lines_of(page)) == ["pmtrain runs", "a --b c"]
    [by] = places("pmtrain bench gpu --list")
    assert by in RUN
    assert not places("pmtrain nothing")
