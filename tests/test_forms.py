"""Every form is held to the interface."""

from __future__ import annotations

import pytest
import torch
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.forms import FORMS, Sizes, Switch, form_named
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.plugins import UnknownName

NAMES = list(FORMS.builtin)


def on_stage(name: str, sizes: Sizes):
    form = form_named(name)
    basis = initial_basis(sizes.width, sizes.k, 1, torch.float64) if form.has_basis else None
    anchor = torch.randn(3, sizes.width, dtype=torch.float64) if form.has_basis else None
    return form(basis), anchor


@pytest.mark.parametrize("name", NAMES)
class TestEveryForm:
    @given(width=st.integers(1, 24), k=st.integers(1, 24))
    def test_tensors_have_the_sizes_that_the_facts_say(self, name, width, k):
        sizes = Sizes(width, 4, min(k, width), 1, 2)
        form, anchor = on_stage(name, sizes)
        columns, seen = form.state_width(sizes), form.optimizer_columns(sizes, form.state_width(sizes))
        weight = form.initial(lambda n: torch.randn(5, n, dtype=torch.float64), columns)
        assert weight.shape == (5, columns)
        state = form.start(weight[:3, : form.embedding_width(sizes)], anchor)
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
        sizes = Sizes(12, 4, 5, 1, 2)
        form, anchor = on_stage(name, sizes)
        weight = form.initial(lambda n: torch.randn(5, n, dtype=torch.float64), form.state_width(sizes))
        rows = weight[:3, : form.embedding_width(sizes)]
        state = form.start(rows, anchor) + weight[2:]
        x = form.read(state, anchor)
        arrived = form.decode(form.encode(state, anchor), anchor)
        if form.has_local_stream:  # which ends here
            torch.testing.assert_close(form.encode(arrived, anchor), form.encode(state, anchor))
        else:
            torch.testing.assert_close(form.read(arrived, anchor), x)
        written = form.rows(rows) + form.rows(weight[2:])
        torch.testing.assert_close(x, written if anchor is None else written + anchor)

    @pytest.mark.parametrize("move", ["transport", "project"])
    def test_weights_follow_a_turn_of_the_basis_within_its_span(self, name, move):
        """A basis turned within its own span changes nothing that is written, if what is kept is what is written."""
        sizes = Sizes(12, 4, 5, 1, 2)
        form, _ = on_stage(name, sizes)
        if form.update_problem() is not None:
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
            sizes = Sizes(12, 4, 5, unconstrained, 3)
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
