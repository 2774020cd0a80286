"""What holds for every file: tests assert no prose, and nobody asks which form or codec it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from protomodels_cli.codecs.registry import registry
from protomodels_cli.forms import FORMS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "protomodels_cli"
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Three words of English in a row, none of them part of a path, an option or a name.
PROSE = re.compile(r"(?<![\w./'-])[A-Za-z]?[a-z']+,? (?:[a-z']+,? )+[a-z]{2,}(?![\w/=:-])")


def prose(tree: ast.AST) -> list[str]:
    """Sentences that a test expects: in what is asserted, in `match=`, and in the values of a parametrized test."""
    return [
        f"line {leaf.lineno}: {leaf.value}"
        for node in ast.walk(tree)
        for expected in _expected(node)
        for leaf in ast.walk(expected)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str) and PROSE.search(leaf.value)
    ]


def _expected(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assert):
        return [node.test]  # not its message, which is for whoever reads the failure
    if isinstance(node, ast.keyword) and node.arg == "match":
        return [node.value]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.parametrize"):
        return node.args[1:]
    return []


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.name)
def test_wording_is_checked_in_test_sentences_alone(file: Path):
    if file.name.startswith("test_sentences"):
        return
    assert prose(ast.parse(file.read_text())) == []


def test_the_search_for_prose_finds_it():
    for line in (
        'assert "the port is taken" in said',
        'assert said == f"the port {port} is taken by {name}, choose another"',
        'with raises(UserError, match="cannot be read"): pass',
        '@pytest.mark.parametrize(("a", "b"), [(1, "must be above zero")])\ndef f(): pass',
    ):
        assert prose(ast.parse(line)), line
    for line in (
        'assert found, "the port is taken"',
        'assert said.startswith("tiny: running")',
        'assert "weights sha256 " in said',
        '@pytest.mark.parametrize("line", ["lab rank --seed 1", "steps: 1\\nmodel: {layers: 2}"])\ndef f(): pass',
    ):
        assert not prose(ast.parse(line)), line


NAMES = {*FORMS.builtin, *registry().builtin}
CLASSES = {technique.__name__ for technique in (*FORMS.builtin.values(), *registry().builtin.values())}


def branches(tree: ast.AST) -> list[str]:
    """Comparisons and matches with the name of a form or codec, tests on its class."""
    found = []
    for node in ast.walk(tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [p.value for p in ast.walk(node.pattern) if isinstance(p, ast.MatchValue)]
            compared += [p.cls for p in ast.walk(node.pattern) if isinstance(p, ast.MatchClass)]
        elif isinstance(node, ast.Call) and _last(node.func) in ("isinstance", "issubclass", "startswith", "endswith"):
            compared = [*node.args]
        for part in compared:
            for leaf in ast.walk(part):
                if (isinstance(leaf, ast.Constant) and leaf.value in NAMES) or _last(leaf) in CLASSES:
                    found.append(f"line {leaf.lineno}: {ast.unparse(leaf)}")
    return found


def _last(leaf: ast.AST) -> str:
    return leaf.id if isinstance(leaf, ast.Name) else leaf.attr if isinstance(leaf, ast.Attribute) else ""


def test_nobody_asks_which_form_or_codec_it_is():
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] not in ("forms", "codecs"):
            assert branches(ast.parse(file.read_text())) == [], file


def test_the_search_for_branches_finds_them():
    for line in (
        "if spec.form == 'dense': pass",
        "x = form in ('reparam', 'q')",
        "isinstance(form, Constrained | int)",
        "match f:\n case 'dense': pass",
        "match f:\n case Reparam(): pass",
        "if codec == 'int8': pass",
        "if codec.startswith('topk'): pass",
        "issubclass(word, codecs.topk.TopK)",
    ):
        assert branches(ast.parse(line)), line
