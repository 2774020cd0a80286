"""Every form is held to the interface, and nothing outside their own files asks which one it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.forms import FORMS, Sizes, Switch, form_named
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.plugins import UnknownName

PACKAGE = Path(__file__).parent.parent / "protomodels_cli"
NAMES = list(FORMS.builtin)
CLASSES = {form.__name__ for form in FORMS.builtin.values()}


def on_stage(name: str, sizes: Sizes):
    form = form_named(name)
    basis = initial_basis(sizes.width, sizes.k, 1, torch.float64) if form.has_basis else None
    anchor = torch.randn(3, sizes.width, dtype=torch.float64) if form.has_basis else None
    return form(basis), anchor


@pytest.mark.parametrize("name", NAMES)
class TestEveryForm:
    @given(width=st.integers(1, 24), k=st.integers(1, 24))
    def test_tensors_have_the_sizes_that_the_facts_say(self, name, width, k):
        sizes = Sizes(width, 4, min(k, width), 1)
        form, anchor = on_stage(name, sizes)
        columns, seen = form.state_width(sizes), form.optimizer_columns(sizes)
        weight = form.initial(lambda n: torch.randn(5, n, dtype=torch.float64), columns)
        assert weight.shape == (5, columns)
        state = form.start(weight[:3], anchor)
        assert state.shape == (3, columns)
        assert form.read(state, anchor).shape == (3, width)
        assert form.encode(state, anchor).shape == (3, form.boundary_width(sizes))
        assert form.decode(form.encode(state, anchor), anchor).shape == (3, columns)
        assert form.project(torch.randn_like(weight)).shape == (5, seen)
        assert form.lift(torch.randn(5, seen, dtype=torch.float64)).shape == weight.shape
        assert form.lifted_columns(sizes) in (0, columns)
        assert form.rows(weight).shape == (5, width)

    def test_what_is_written_arrives(self, name):
        """x is the same on both sides of a boundary, and what a block writes is what the export says it writes."""
        sizes = Sizes(12, 4, 5, 1)
        form, anchor = on_stage(name, sizes)
        weight = form.initial(lambda n: torch.randn(5, n, dtype=torch.float64), form.state_width(sizes))
        state = form.start(weight[:3], anchor) + weight[2:]
        x = form.read(state, anchor)
        torch.testing.assert_close(form.read(form.decode(form.encode(state, anchor), anchor), anchor), x)
        written = form.rows(weight[:3] + weight[2:])
        torch.testing.assert_close(x, written if anchor is None else written + anchor)

    @pytest.mark.parametrize("move", ["transport", "project"])
    def test_weights_follow_a_turn_of_the_basis_within_its_span(self, name, move):
        """A basis turned within its own span changes nothing that is written, if what is kept is what is written."""
        sizes = Sizes(12, 4, 5, 1)
        form, _ = on_stage(name, sizes)
        if not form.has_basis:
            return
        weight = form.initial(lambda n: torch.randn(5, n, dtype=torch.float64), form.state_width(sizes))
        before, old = form.rows(weight).clone(), form.u
        turn, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
        new = old @ turn
        form.follow(weight, Switch(old, new, old.T @ new, move))
        form.basis = type(form.basis)(1, new.contiguous())
        coordinates = form.rows(weight) @ new
        torch.testing.assert_close(coordinates, before @ (old if move == "transport" else new))

    def test_its_least_last_stage_holds_its_free_layers(self, name):
        for unconstrained in (0, 1, 3):
            sizes = Sizes(12, 4, 5, unconstrained)
            form = form_named(name)
            free = form.free_layers(sizes)
            assert 0 <= free <= 4
            assert form.least_last_layers(sizes) >= 1
            assert form.boundary_width(sizes) == sizes.width or form.least_last_layers(sizes) >= free

    def test_every_optimizer_fits_or_is_refused_with_rule_and_fix(self, name):
        form = form_named(name)
        for optimizer in ("muon", "adamw", "row_adamw"):
            problem = form.optimizer_problem(optimizer)
            assert problem is None or all(problem)
            if problem is None:
                make_spec(subspace={"form": name}, optimizer={"name": optimizer})
                assert form.rule_for(optimizer, "writer") == optimizer


def test_an_unknown_name_is_no_form():
    with pytest.raises(UnknownName):
        form_named("os.path")


def branches(tree: ast.AST) -> list[str]:
    """Comparisons and matches with a form's name, tests on a form's class."""
    found = []
    for node in ast.walk(tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [p.value for p in ast.walk(node.pattern) if isinstance(p, ast.MatchValue)]
            compared += [p.cls for p in ast.walk(node.pattern) if isinstance(p, ast.MatchClass)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            compared = [*node.args]
        for part in compared:
            for leaf in ast.walk(part):
                named = isinstance(leaf, ast.Constant) and leaf.value in NAMES
                if named or (isinstance(leaf, ast.Name | ast.Attribute) and _last(leaf) in CLASSES):
                    found.append(ast.unparse(leaf))
    return found


def _last(leaf: ast.Name | ast.Attribute) -> str:
    return leaf.id if isinstance(leaf, ast.Name) else leaf.attr


def test_nobody_asks_which_form_it_is():
    for file in PACKAGE.rglob("*.py"):
        if "forms" not in file.relative_to(PACKAGE).parts:
            assert not branches(ast.parse(file.read_text())), file


def test_the_search_for_branches_finds_them():
    for line in (
        "if spec.form == 'dense': pass",
        "x = form in ('reparam', 'q')",
        "isinstance(form, Constrained | int)",
        "match f:\n case 'dense': pass",
        "match f:\n case Reparam(): pass",
    ):
        assert branches(ast.parse(line)), line
