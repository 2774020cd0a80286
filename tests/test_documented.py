"""Every command in README and docs is run by a test, or says why not: the table is in documented_commands.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from documented_commands import NOT_RUN, ROOT, RUN, documented, fits, lines_of, places

from protomodels_cli.cli.main import app


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


FOREIGN = {  # options of other programs, which sentences and commands of ours name
    *("--user", "--index-url", "--extra-index-url", "--force-reinstall", "--torch-backend", "--pip-args", "--python"),
    *("--no-deps", "--remotes", "--contains", "--gpus", "--logdir", "--quiet", "--version", "--help"),
    *("--permanent", "--add-port", "--reload", "--ulimit", "--long", "--query-gpu"),
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
OWN_PARSERS = {"pb", "bench", "launch"}  # what they name are options of programs that they are or start
IN_WORDS = re.compile(r"`pmtrain ((?:[a-z]+ ?)+)([^`]*)`")


def options_of(command: Any, name: str = "") -> dict[str, set[str]]:
    """By command, as `token create`."""
    inner = getattr(command, "commands", {})
    if inner:
        return {k: v for key, one in inner.items() for k, v in options_of(one, f"{name} {key}".strip()).items()}
    return {name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}}


def wrong_options(text: str, known: dict[str, set[str]]) -> list[str]:
    """Options that a text names and no command has, or not the command that it names them with."""
    every = set().union(*known.values()) | FOREIGN
    found = [option for option in OPTION.findall(text) if option not in every]
    for words, rest in IN_WORDS.findall(text):
        parts = words.split()
        name = next((" ".join(parts[:n]) for n in (2, 1) if " ".join(parts[:n]) in known), None)
        if name is None:
            if parts[0] not in {one.split()[0] for one in known}:
                found.append(words)
            continue
        found += [f"{name} {option}" for option in OPTION.findall(rest) if option not in known[name]]
    return found


def texts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_sentence_has_a_word_that_stands_for_the_users_own():
    """A command in a sentence can be copied as it is."""
    found = [
        (file.name, text)
        for file in (ROOT / "protomodels_cli").rglob("*.py")
        for text in texts(file)
        if "RUN_DIR" in text and "pb" not in file.parts
    ]
    assert found == []


def test_every_option_and_command_that_a_sentence_names_exists():
    known = options_of(typer.main.get_command(app))
    files = [file for file in (ROOT / "protomodels_cli").rglob("*.py") if not OWN_PARSERS & set(file.parts)]
    wrong = {file.name: found for file in files for text in texts(file) if (found := wrong_options(text, known))}
    assert wrong == {}
    assert wrong_options("see `pmtrain peers --json`", known) == ["peers --json"]
    assert wrong_options("see `pmtrain statsu RUN`, add --nonsense", known) == ["--nonsense", "statsu "]
